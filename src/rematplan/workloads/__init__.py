"""Built-in workloads: factories that take sizes by keyword and return a `Workload` on shapes only.

    rematplan plan rematplan.workloads:gpt blocks=12 batch=8 --budget 4GiB --target tpu-v5e

No array is made until a verb runs the program: the models come from `nnx.eval_shape`, and `init` makes real parameters
and inputs when `verify` asks for them.
"""

from __future__ import annotations

from rematplan.workloads._decoder import decoder
from rematplan.workloads._gpt import gpt
from rematplan.workloads._mlp import mlp
from rematplan.workloads._policy_mlp import policy_mlp
from rematplan.workloads._resnet import resnet
from rematplan.workloads._scan_gpt import scan_gpt
from rematplan.workloads._unet import unet
from rematplan.workloads._vit import vit

__all__ = ["decoder", "gpt", "mlp", "policy_mlp", "resnet", "scan_gpt", "unet", "vit"]
