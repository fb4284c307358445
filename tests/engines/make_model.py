"""Makes a model that vLLM runs on a CPU: two layers of chance, and a tokenizer learned from Python's sources.

Runs with the engines' own Python: `python make_model.py FOLDER`.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
CONTEXT_TOKENS = 8192
_SOURCES = 150
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A BPE tokenizer of every byte, so that no text is unknown to it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|eos|>", "<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.train(list(map(str, sorted(library.glob("*.py"))[:_SOURCES])), trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>", pad_token="<|eos|>")
    made.chat_template = _CHAT_TEMPLATE
    return made


def make_model() -> LlamaForCausalLM:
    """The smallest Llama that vLLM's CPU kernels take; the same weights each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main(folder: Path) -> None:
    """Write both into the folder."""
    make_tokenizer().save_pretrained(folder)
    make_model().save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
