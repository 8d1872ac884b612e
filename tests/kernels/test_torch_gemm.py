"""Lending torch's multiply: found or explained, below autograd and autocast, and one thread in workers only."""

import json
import subprocess
import sys

import pytest
import torch
from kernel_views import K, gemm
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_mpmd.engine import torch_gemm


@pytest.fixture
def lent():
    loan = torch_gemm.lend()
    assert loan.lent, loan.reason
    return loan


def test_lending_is_idempotent_and_can_be_taken_back(lent):
    assert torch_gemm.lend() is lent
    assert K.gemm_is_lent()
    torch_gemm.take_back()
    assert not K.gemm_is_lent()
    assert torch_gemm.loan().reason == "taken back"
    with pytest.raises(RuntimeError, match="no gemm is lent"):
        gemm(torch.ones(2, 2), torch.ones(2, 2), way=K.GemmWay.lent)
    K.lent_gemm_thread_init()


def test_a_missing_symbol_is_named_and_the_own_kernel_serves(monkeypatch):
    torch_gemm.take_back()
    monkeypatch.setitem(torch_gemm._SYMBOLS, "mm_out", "aoti_torch_cpu_mm_out_of_another_version")
    loan = torch_gemm.lend()
    assert not loan.lent
    assert "aoti_torch_cpu_mm_out_of_another_version" in loan.reason
    assert K.gemm_way(1000) == K.GemmWay.own
    assert torch.equal(gemm(torch.ones(2, 3), torch.ones(3, 2)), torch.full((2, 2), 3.0))


def test_without_torch_the_reason_says_so(monkeypatch):
    torch_gemm.take_back()
    monkeypatch.delitem(sys.modules, "torch")
    assert torch_gemm.lend() == torch_gemm.Loan(False, "torch is not imported")


def test_the_own_kernel_is_used_wherever_it_has_vectors(lent):
    chosen = K.isa()
    try:
        for isa in K.Isa:
            if K.select_isa(isa):
                expected = K.GemmWay.lent if isa == K.Isa.baseline else K.GemmWay.own
                assert K.gemm_way(128) == expected
                assert K.gemm_way(1) == K.GemmWay.own
    finally:
        K.select_isa(chosen)


def test_the_lent_call_is_below_autograd_autocast_and_dispatch_modes(lent):
    class Recorder(TorchDispatchMode):
        seen: tuple[str, ...] = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen = (*self.seen, str(func))
            return func(*args, **(kwargs or {}))

    x, w = torch.randn(20, 30, requires_grad=True), torch.randn(30, 40, requires_grad=True)
    y = torch.empty(20, 40)
    with torch.autocast("cpu", torch.bfloat16), Recorder() as recorder:
        K.gemm_by(K.GemmWay.lent, K.DType.float32, 20, 40, 30, x.data_ptr(), 30, w.data_ptr(), 40, y.data_ptr(), 40)
        seen = recorder.seen
    assert seen == ()
    assert y.grad_fn is None
    torch.testing.assert_close(y, (x @ w).detach(), rtol=1e-5, atol=1e-5)


# Counts seen by torch, OpenMP and MKL: in the main thread before and after, in a worker before and after a product, in
# a thread that was there before, and in one started afterwards.
_COUNTS_SCRIPT = """
import ctypes, json, queue, sys, threading
import torch
from hyper_mpmd import _native
from hyper_mpmd.engine import torch_gemm

setting = json.loads(sys.argv[1])
if setting is not None:
    torch.set_num_threads(setting)
loan = torch_gemm.lend()
assert loan.lent, loan.reason
library = torch_gemm._loaded_torch_library()

def counts():
    seen = {"torch": torch.get_num_threads(), "omp": library.omp_get_max_threads()}
    if loan.mkl:
        seen["mkl"] = library.MKL_Get_Max_Threads()
    return seen

def in_thread(function):
    answers = queue.Queue()
    thread = threading.Thread(target=lambda: answers.put(function()))
    thread.start()
    answer = answers.get(timeout=30)
    thread.join()
    return answer

def multiply():
    x = torch.randn(300, 300)
    return (x @ x).sum().item()

def work():
    _native.kernels.lent_gemm_thread_init()
    first = counts()
    multiply()
    _native.kernels.lent_gemm_thread_init()
    assert first == counts()
    return first

go, result = threading.Event(), queue.Queue()
early = threading.Thread(target=lambda: (multiply(), go.wait(30), result.put(counts())))
early.start()
before = counts()
worker = in_thread(work)
after = counts()
late = in_thread(lambda: (multiply(), counts())[1])
go.set()
print(json.dumps({"before": before, "worker": worker, "main": after, "late": late, "early": result.get(timeout=30)}))
early.join()
"""


@pytest.mark.parametrize("setting", [None, 1, 3])
def test_workers_run_one_thread_and_no_other_thread_notices(setting):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _COUNTS_SCRIPT, json.dumps(setting)],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert set(counts["worker"].values()) == {1}
    if setting is not None:
        assert set(counts["before"].values()) == {setting}
    for thread in ("main", "late", "early"):
        assert counts[thread] == counts["before"], thread
