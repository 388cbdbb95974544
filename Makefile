.PHONY: check proofs test format

# Pass the checks of every change with the tools on PATH
check:
	.ci/check

# Pass the exhaustive proofs, with everything optional installed
proofs:
	.ci/proofs

# Create .venv with the development tools and pass the checks of every change
test:
	.ci/test

# Rewrite the sources in the one format
format:
	ruff format .
	ruff check --fix .
