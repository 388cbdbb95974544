.PHONY: check format setup

# Pass every check with the tools on PATH
check:
	.ci/check

# Rewrite the sources in the one format
format:
	ruff format .
	ruff check --fix .

# Create .venv with the development tools and pass every check
setup:
	.ci/run
