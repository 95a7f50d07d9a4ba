"""Conversations: the forms in which they are written, their tokens, and what is learnt from them, by losses of trl."""

import sys

from transformers.utils import is_bitsandbytes_available

# The configurations of trl import PEFT, which imports bitsandbytes if it is installed: seconds, and a context on a GPU. PEFT
# asks for it again when it adapts a model in 4 bits.
if is_bitsandbytes_available() and "bitsandbytes" not in sys.modules:  # transformers keeps this answer
    sys.modules["bitsandbytes"] = None  # pyright: ignore[reportArgumentType]
    import peft

    del sys.modules["bitsandbytes"]
    peft.import_utils.is_bnb_available.cache_clear()
    peft.import_utils.is_bnb_4bit_available.cache_clear()
