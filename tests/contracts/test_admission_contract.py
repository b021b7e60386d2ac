"""The built-in admissions keep the contract of stage 3."""

from __future__ import annotations

from core.stages.admission import LoadAware, Open
from core.testing.admission import AdmissionContract


class TestOpen(AdmissionContract):
    component = Open


class TestLoadAware(AdmissionContract):
    component = LoadAware
