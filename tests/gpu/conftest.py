"""The tests of one process compile more shapes than a program ever does."""

from __future__ import annotations

import torch

torch._dynamo.config.recompile_limit = 64
