"""The layers by the names of their classes: a function for each."""

from __future__ import annotations

from collections.abc import Mapping

from gemsc.importers.keras.activation import ACTIVATION_LAYERS
from gemsc.importers.keras.attention import ATTENTION_LAYERS
from gemsc.importers.keras.conv import CONV_LAYERS
from gemsc.importers.keras.core import CORE_LAYERS
from gemsc.importers.keras.layer import Translator
from gemsc.importers.keras.merge import MERGE_LAYERS
from gemsc.importers.keras.norm import NORM_LAYERS
from gemsc.importers.keras.pad import PAD_LAYERS
from gemsc.importers.keras.pool import POOL_LAYERS
from gemsc.importers.keras.recurrent import RECURRENT_LAYERS
from gemsc.importers.keras.resize import RESIZE_LAYERS

LAYERS: Mapping[str, Translator] = {
    **ACTIVATION_LAYERS,
    **ATTENTION_LAYERS,
    **CORE_LAYERS,
    **RESIZE_LAYERS,
    **PAD_LAYERS,
    **POOL_LAYERS,
    **NORM_LAYERS,
    **CONV_LAYERS,
    **MERGE_LAYERS,
    **RECURRENT_LAYERS,
}
