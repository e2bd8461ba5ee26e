"""How library kernels are called, with stand-ins that refuse what the real ones do."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.ops.test_document_kernels import standing_in
from tests.training.ops.test_documents import normal
from training.ops import conv, norm
from training.ops.conv import causal_conv1d
from training.ops.dispatch import absent
from training.ops.norm import rms_norm


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Any = None, seq_idx: Any = None, activation: Any = None
) -> Tensor:
    """Check x (b, d, l) as csrc/causal_conv1d.cpp of causal-conv1d 1.6.1 does."""
    assert x.stride(1) == 1 and x.shape[1] % 8 == 0
    assert x.stride(0) % 8 == 0 and x.stride(2) % 8 == 0
    assert 2 <= weight.shape[1] <= 4
    y = causal_conv1d(x.transpose(1, 2), weight[:, None], bias, activation == "silu")
    return y.transpose(1, 2)


@pytest.mark.parametrize(
    ("channels", "taps", "between", "noted"),
    [(8, 4, 24, ""), (8, 4, 20, ""), (12, 4, 24, "12 channels and 4 taps"), (8, 5, 24, "5 taps")],
    ids=["fits", "steps lie oddly far apart", "channels", "taps"],
)
def test_the_convolution_of_what_its_kernel_does_not_take(
    channels: int, taps: int, between: int, noted: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As in Mamba-2 with tensor parallelism, where x is a part of a rank's product."""
    x = normal(2, 16, between)[..., 4 : 4 + channels]  # (b, l, d)
    weight, bias = normal(channels, 1, taps), normal(channels)
    conv._note_unfit.cache_clear()
    caplog.set_level(logging.INFO, "training")
    with standing_in(causal_conv1d=SimpleNamespace(causal_conv1d_fn=causal_conv1d_fn)):
        y = conv._fast(x, weight, bias, True, None)
    torch.testing.assert_close(y, causal_conv1d(x, weight, bias, True))
    assert noted in caplog.text and ("torch for" in caplog.text) == bool(noted)


@pytest.mark.parametrize("name", ["layer_norm", "layernorm"], ids=["version 2", "version 1"])
def test_norms_are_taken_from_either_version_of_mamba_ssm(name: str) -> None:
    x, weight = normal(2, 5, 8), normal(8).bfloat16()

    def rms_norm_fn(x: Tensor, weight: Tensor, bias: None, *, eps: float) -> Tensor:
        return rms_norm(x, weight, eps).to(x.dtype)

    on_a_gpu: Any = SimpleNamespace(is_cuda=True)
    absent.cache_clear()
    assert "mamba_ssm" in norm._unfit(on_a_gpu)
    absent.cache_clear()
    try:
        module = SimpleNamespace(rms_norm_fn=rms_norm_fn)
        with standing_in(**{f"mamba_ssm__ops__triton__{name}": module}):
            assert norm._unfit(on_a_gpu) == ""
            y = norm._fast(x, weight, 1e-5)
    finally:
        absent.cache_clear()
    torch.testing.assert_close(y, rms_norm(x, weight, 1e-5))
