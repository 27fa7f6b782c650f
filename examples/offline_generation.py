"""Generate without a server: the embedded pair, three prompts together, what speculation did for each.

python examples/offline_generation.py
"""

from outrider.cluster import LLM, SamplingParams

PROMPTS = ["def read_lines(path):\n", "import os\nimport ", "class Stack:\n    def __init__(self):\n"]


def main() -> None:
    # no model: the embedded pair, which needs no download; "always": draft, whether or not it pays for so small a model
    with LLM(speculation="always") as llm:
        for output in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=32)):
            counters = output.metrics
            print(f"--- {counters.num_accepted_tokens} of {counters.num_draft_tokens} draft tokens were right")
            print(f"{output.prompt}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
