"""A tokenizer of Gemma's structure with a few hundred pieces, learned from a given text.

The written tokenizer.json has what Gemma's has: added tokens matched on the raw text (control tokens, newline runs, runs of
"▁"), spaces turned into "▁", byte-pair merges by rank, unknown characters as <0xNN> bytes, one <bos> in front.
"""

import collections
import re

CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>"]
TURNS = ["<start_of_turn>", "<end_of_turn>"]
IMAGE = ["<start_of_image>", "<end_of_image>"]
IMAGE_SOFT = "<image_soft_token>"
NUM_NEWLINE_RUNS = 10
NUM_SPACE_RUNS = 4
CHARACTERS = "▁" + "".join(chr(c) for c in range(0x21, 0x7F)) + "\t’‘“”–—…·×°€£é"
# Words never merge with the punctuation beside them; a word keeps the space before it.
WORD = re.compile(r"▁?[A-Za-z]+|.", re.DOTALL)


def learn_merges(text, num_merges):
    """Byte-pair merges of `text`, most frequent pair first, ties by spelling."""
    words = collections.Counter(tuple(word) for line in text for word in WORD.findall(line.replace(" ", "▁")))
    words = {word: n for word, n in words.items() if len(word) > 1}
    merges = []
    while len(merges) < num_merges:
        pairs = collections.Counter()
        for word, n in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += n
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = {merge_word(word, best): n for word, n in words.items()}
    return merges


def merge_word(word, pair):
    merged = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def added_token(token_id, content, special):
    return {
        "id": token_id,
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def make_tokenizer(text, max_pieces):
    """tokenizer.json's content: `max_pieces` ids at most, the image token last, as the only one outside the base vocabulary."""
    newline_runs = ["\n" * n for n in range(1, NUM_NEWLINE_RUNS + 1)]
    space_runs = ["▁" * n for n in range(2, NUM_SPACE_RUNS + 1)]
    head = CONTROL + ["<mask>"] + TURNS + newline_runs + space_runs + [f"<0x{b:02X}>" for b in range(256)]
    space_merges = [["▁" * left, "▁" * (n - left)] for n in range(2, NUM_SPACE_RUNS + 1) for left in range(n - 1, 0, -1)]
    num_merges = max_pieces - len(head) - len(CHARACTERS) - len(IMAGE) - 1
    merges = learn_merges(text, num_merges)
    pieces = head + [left + right for left, right in merges] + list(CHARACTERS) + IMAGE
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if len(vocab) != len(pieces):
        raise ValueError("two merges make the same piece")
    special = set(CONTROL + TURNS + IMAGE)
    added = [p for p in pieces if p in special or p == "<mask>" or p in newline_runs or p in space_runs]
    tokens = [added_token(vocab[p], p, p in special) for p in added] + [added_token(len(pieces), IMAGE_SOFT, True)]
    bos = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
    second_bos = {"SpecialToken": {"id": "<bos>", "type_id": 1}}
    first = {"Sequence": {"id": "A", "type_id": 0}}
    second = {"Sequence": {"id": "B", "type_id": 1}}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": tokens,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [bos, first],
            "pair": [bos, first, second_bos, second],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [vocab["<bos>"]], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": space_merges + [list(pair) for pair in merges],
        },
    }
