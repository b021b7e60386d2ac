"""The class behind sampler `chaos`; apart from the plugin's hooks, since it imports torch."""

from __future__ import annotations

import time

import torch
from chaos_plugin import ChaosSettings

from core.batch import SamplerOutput, SamplingMetadata
from core.stages.sampler import SamplerContext
from plugins.samplers.standard import Standard


class Chaos(Standard):
    Settings = ChaosSettings

    def __init__(self, settings: ChaosSettings, context: SamplerContext):
        time.sleep(settings.start_pause)
        super().__init__(settings, context)
        self._chaos = settings

    def sample(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        time.sleep(self._chaos.pause)
        wanted = (self._chaos.fault_seed, self._chaos.fault_position)
        if any((row.seed, row.position) == wanted for row in metadata.rows):
            raise RuntimeError("the sampler failed, as asked")
        return super().sample(logits, metadata)
