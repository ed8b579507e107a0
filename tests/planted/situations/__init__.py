"""Small sweeps, each of which a report has one thing to say of, by topic and name."""

from __future__ import annotations

from tests.planted.situations.answers import ANSWERS, OVERVIEW
from tests.planted.situations.batches import BATCHES
from tests.planted.situations.effects import EFFECTS
from tests.planted.situations.epochs import EPOCHS, LOADING
from tests.planted.situations.gpus import GPUS
from tests.planted.situations.learning import LEARNING, STARTING
from tests.planted.situations.notices import NOTICES
from tests.planted.situations.situation import Situation

SITUATIONS: dict[str, dict[str, Situation]] = {
    "effects": EFFECTS,
    "learning": LEARNING,
    "starting": STARTING,
    "answers": ANSWERS,
    "overview": OVERVIEW,
    "batches": BATCHES,
    "gpus": GPUS,
    "epochs": EPOCHS,
    "loading": LOADING,
    "notices": NOTICES,
}
"""By topic and name."""
