"""Lend torch's own matrix multiply to the native kernels, without a line of C++ that includes torch.

torch exports C symbols for its ahead-of-time compiler (torch/csrc/inductor/aoti_torch/c/shim.h); their addresses are
looked up in the library that `import torch` has already loaded and handed to the native side. The call lands below
autograd and autocast. The native kernels use it where it is faster than their own (`_native.kernels.gemm_way`), and the
thread-count functions that come with it in every worker thread, so that whatever torch code runs there runs on one
thread. If a symbol is missing the kernels use their own gemm everywhere, and `loan()` says why.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hyper_mpmd import _native

# Parameter of _native.kernels.lend_gemm -> symbol. dlsym also searches what a library was linked against, which is how
# libtorch_cpu answers for the OpenMP runtime that torch itself uses.
_SYMBOLS = {
    "create_tensor_from_blob": "aoti_torch_create_tensor_from_blob",
    "delete_tensor": "aoti_torch_delete_tensor_object",
    "mm_out": "aoti_torch_cpu_mm_out",
    "get_num_threads": "_ZN2at15get_num_threadsEv",
    "omp_set_num_threads": "omp_set_num_threads",
}
_MKL_SYMBOL = "MKL_Set_Num_Threads_Local"  # only in builds with MKL


@dataclass(frozen=True)
class Loan:
    """Whether torch's multiply is on loan to the native kernels, and if not, why."""

    lent: bool
    reason: str
    mkl: bool = False


_loan = Loan(False, "lend() has not been called")


def loan() -> Loan:
    """The state of affairs after the last `lend()` or `take_back()`."""
    return _loan


def lend() -> Loan:
    """Hand torch's multiply to the native kernels; the second call changes nothing. Never raises: see `Loan.reason`.

    Call it before the first launch: which gemm is used must not change between runs that are compared bit for bit.
    """
    global _loan
    if not _loan.lent:
        _loan = _lend()
    return _loan


def take_back() -> None:
    """Let the kernels use only their own gemm again. No kernel may be running."""
    global _loan
    _native.kernels.take_gemm_back()
    _loan = Loan(False, "taken back")


def _lend() -> Loan:
    library = _loaded_torch_library()
    if isinstance(library, str):
        return Loan(False, library)
    addresses = {name: _address(library, symbol) for name, symbol in _SYMBOLS.items()}
    missing = [_SYMBOLS[name] for name, address in addresses.items() if address == 0]
    if missing:
        return Loan(False, f"this build of torch does not export {', '.join(missing)}")
    mkl = _address(library, _MKL_SYMBOL)
    _native.kernels.lend_gemm(**addresses, mkl_set_num_threads_local=mkl)
    return Loan(True, "", mkl=mkl != 0)


def _loaded_torch_library() -> ctypes.CDLL | str:
    """The libtorch_cpu of this process, or why there is none. Never loads a second copy."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "torch is not imported"
    if not hasattr(os, "RTLD_NOLOAD"):
        return f"shared libraries cannot be looked up by name on {sys.platform}"
    folder = Path(str(torch.__file__)).parent / "lib"
    tried = [folder / "libtorch_cpu.so", folder / "libtorch_cpu.dylib"]
    for path in tried:
        try:
            return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    return f"torch has not loaded any of {', '.join(map(str, tried))}"


def _address(library: ctypes.CDLL, symbol: str) -> int:
    try:
        function = getattr(library, symbol)
    except AttributeError:
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0
