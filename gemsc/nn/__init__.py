"""Layers that PyTorch has not; the compiler knows them as it knows torch.nn's.

BatchNorm here is that of Keras (`BatchNormalization`) and ONNX ("population variance"):
they average the sums of (x - mean)^2 / n over batches, PyTorch those divided by n - 1.
Outputs and gradients are alike; without these layers the running variance is off by
n / (n - 1), which no gradient shows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BiasedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """What the layers below share: `nn.BatchNorm` with an average of biased variances.

    A batch of one value a channel, which PyTorch refuses, has the variance 0.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize; in training by the batch, whose statistics are averaged."""
        mean, variance = self.running_mean, self.running_var
        if not self.training or mean is None or variance is None:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        # the buffers themselves may not change between a forward and its backward
        of_batch = torch.zeros_like(mean), torch.zeros_like(variance)
        fast = torch.backends.cudnn.enabled
        result = torch.batch_norm(
            input, self.weight, self.bias, *of_batch, True, 1.0, self.eps, fast
        )
        with torch.no_grad():
            count = input.numel() // input.shape[1]
            biased = of_batch[1] * ((count - 1) / count)
            if count == 1:  # 0 / 0 so far
                biased = torch.zeros_like(variance)
            momentum = self._momentum(mean)
            mean.lerp_(of_batch[0], momentum)
            variance.lerp_(biased, momentum)
        return result

    def _momentum(self, like: Tensor) -> Tensor:
        """Count the batch; return its share in the averages."""
        count = self.num_batches_tracked
        if count is not None:
            count.add_(1)
        if self.momentum is None and count is not None:  # the plain mean of all batches
            return count.double().reciprocal().to(like)
        return like.new_full((), self.momentum or 0.0)


class BatchNorm1d(BiasedBatchNorm, nn.BatchNorm1d):
    """`nn.BatchNorm1d` with an average of biased variances: (N, C) or (N, C, L)."""


class BatchNorm2d(BiasedBatchNorm, nn.BatchNorm2d):
    """`nn.BatchNorm2d` with an average of biased variances: (N, C, H, W)."""


class BatchNorm3d(BiasedBatchNorm, nn.BatchNorm3d):
    """`nn.BatchNorm3d` with an average of biased variances: (N, C, D, H, W)."""


class FrozenBatchNorm(nn.Module):
    """BatchNorm by fixed statistics, in training too: nothing in it is trained.

    That is a layer of Keras with `trainable = False`. Its tensors have the names of
    `nn.BatchNorm2d`'s, but are buffers; the input is (N, C, ...).
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer for so many channels."""
        super().__init__()
        self.num_features, self.eps = num_features, eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            make = torch.ones if name in ("weight", "running_var") else torch.zeros
            self.register_buffer(name, make(num_features, device=device, dtype=dtype))

    def forward(self, input: Tensor) -> Tensor:
        """Normalize."""
        fixed = self.running_mean, self.running_var, self.weight, self.bias
        return F.batch_norm(input, *fixed, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the settings."""
        return f"{self.num_features}, eps={self.eps}"
