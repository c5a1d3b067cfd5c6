"""The engine's arithmetic for training: a stock Hugging Face model computes the engine's logits, bit for bit.

`adopt(model)` exchanges the forward of its modules for the kernels that the engine's plan would choose, `restore`
undoes it, and `logprobs` is the engine's log-softmax with a gradient. Needs no server and no running engine;
`transformers` is imported only when a model is adopted.
"""

from tokenspeed.trainer.adoption import Adoption, adopt, restore
from tokenspeed.trainer.logprobs import logprobs
from tokenspeed.trainer.packing import forget_packed_weights

__all__ = ["Adoption", "adopt", "forget_packed_weights", "logprobs", "restore"]
