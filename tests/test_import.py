"""`import hyper_mpmd` is cheap and pulls in nothing heavy."""

import subprocess
import sys


def test_import_pulls_in_no_heavy_package():
    code = (
        "import sys, hyper_mpmd; heavy = {'torch', 'numpy', 'pydantic', 'rich', 'typer', 'hyper_mpmd._native'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_native_module_has_the_package_version():
    import hyper_mpmd
    from hyper_mpmd import _native

    assert _native.version() == hyper_mpmd.__version__
