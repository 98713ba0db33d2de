"""The demo's prompts: half of them copy from the prompt, where lookup shines, half do not."""

from __future__ import annotations

PROMPTS: tuple[tuple[str, str], ...] = (
    (
        "spelling",
        "Correct the spelling of this text and change nothing else:\n\n"
        "The meeting of the gardn club is on Tuesday at sevn in the evening. Please bring the "
        "seeds that you orderd in spring, and a chair if you have one. After the meeting there "
        "will be tea and caek for everybody.",
    ),
    ("explain", "Why is the sky blue during the day, and why does it turn red in the evening?"),
    (
        "rename",
        "Rename the variable `totals` to `sums` in this function:\n\n"
        "```python\n"
        "def mean_of_columns(table):\n"
        "    totals = [0.0] * len(table[0])\n"
        "    for row in table:\n"
        "        for index, value in enumerate(row):\n"
        "            totals[index] += value\n"
        "    return [total / len(table) for total in totals]\n"
        "```",
    ),
    ("poem", "Write a short poem about a lighthouse in winter and the ships that pass it by."),
    (
        "extract",
        "Copy the lines of this list that are about fruit:\n\n"
        "- apples, two kilos, from the farm\n"
        "- light bulbs, four, for the hall\n"
        "- bananas, six, not too ripe\n"
        "- printer paper, one pack of 500\n"
        "- cherries, half a kilo, if there are any\n"
        "- oranges, ten, for juice",
    ),
    (
        "story",
        "Tell me a story about a young baker who finds an old map inside a sack of flour.",
    ),
    (
        "quote",
        "Answer with the sentence of the text that says how old the bridge is.\n\n"
        "Text: The stone bridge of the village has five arches. The stone bridge was built by "
        "two brothers in the year 1702, so it is more than three hundred years old. Today only "
        "people on foot and on bicycles may use the stone bridge.",
    ),
    ("advice", "What should I think about before I adopt a dog? Give me your best advice."),
)
