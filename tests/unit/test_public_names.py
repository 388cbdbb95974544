"""The public namespace: what it exports, and what importing it costs."""

import subprocess
import sys

import gemm_tuner


def test_all_names_are_exported_and_sorted() -> None:
    assert gemm_tuner.__all__ == sorted(gemm_tuner.__all__)
    assert dir(gemm_tuner) == gemm_tuner.__all__
    for name in gemm_tuner.__all__:
        assert getattr(gemm_tuner, name) is not None
    assert vars(gemm_tuner)["linear"] is gemm_tuner.linear, "it is looked up once"


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(gemm_tuner, "no_such_name")


def test_importing_the_package_loads_no_library() -> None:
    program = (
        "import sys, gemm_tuner; "
        "sys.exit(bool({'numpy', 'sqlalchemy', 'httpx', 'rich'} & sys.modules.keys()))"
    )

    completed = subprocess.run([sys.executable, "-c", program], check=False)

    assert completed.returncode == 0


def test_the_client_loads_no_database_and_no_generator() -> None:
    program = (
        "import sys; from gemm_tuner import Client; print(Client); "
        "sys.exit(bool({'jinja2', 'ml_dtypes', 'sqlalchemy'} & sys.modules.keys()))"
    )

    completed = subprocess.run([sys.executable, "-c", program], check=False)

    assert completed.returncode == 0
