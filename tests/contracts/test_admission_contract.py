"""The built-in admissions keep the contract of stage 3."""

from __future__ import annotations

from core.stages.admission import Open
from core.stages.load_aware import LoadAware
from core.testing.admission import AdmissionContract


class TestOpen(AdmissionContract):
    component = Open


class TestLoadAware(AdmissionContract):
    component = LoadAware
