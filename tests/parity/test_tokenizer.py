"""Token ids and decoded text against the `tokenizers` package, for Gemma 3's own tokenizer and the demo's small one."""

import lzma
import json
import os
import pathlib
import random
import subprocess
import unicodedata

import pytest
import tokenizers

SOURCE = pathlib.Path(os.environ.get("GEMTUNE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
BUILD = pathlib.Path(os.environ.get("GEMTUNE_BUILD_DIR", SOURCE / "build"))
TOOL = BUILD / "tests" / "gemtune_tokenize"

BLOCKS = [
    (0x0020, 0x007F), (0x00A0, 0x0250), (0x0250, 0x02B0), (0x0300, 0x0370), (0x0370, 0x0400), (0x0400, 0x0530), (0x0530, 0x0590),
    (0x0590, 0x0600), (0x0600, 0x0700), (0x0900, 0x0980), (0x0980, 0x0A00), (0x0A00, 0x0B00), (0x0B80, 0x0C00), (0x0C00, 0x0D00),
    (0x0D00, 0x0E00), (0x0E00, 0x0E80), (0x0F00, 0x1000), (0x1000, 0x10A0), (0x10A0, 0x1100), (0x1100, 0x1200), (0x1200, 0x1380),
    (0x13A0, 0x1400), (0x1780, 0x1800), (0x1800, 0x18B0), (0x1E00, 0x1F00), (0x1F00, 0x2000), (0x2000, 0x2070), (0x20A0, 0x20D0),
    (0x2100, 0x2300), (0x2500, 0x2600), (0x2600, 0x27C0), (0x3000, 0x3100), (0x3100, 0x3200), (0x4E00, 0x5200), (0x9000, 0x9FA0),
    (0xAC00, 0xB000), (0xD000, 0xD7A4), (0xE000, 0xE100), (0xF900, 0xFB00), (0xFE00, 0xFE10), (0xFF00, 0xFFF0), (0x10000, 0x10080),
    (0x10330, 0x10350), (0x12000, 0x12100), (0x1D400, 0x1D500), (0x1F300, 0x1F650), (0x1F900, 0x1FA00), (0x20000, 0x20100),
    (0xE0000, 0xE0080), (0x10FF00, 0x10FFFE),
]
WORDS = (
    "the product description of a red mug, durable and light; L'été à Zürich, naïve café, Grüße, señor, smörgåsbord, żółć, "
    "Здравствуйте товары описание, Καλημέρα κόσμε, שלום עולם, مرحبا بالعالم, नमस्ते दुनिया, স্বাগতম, வணக்கம், สวัสดีชาวโลก, "
    "こんにちは世界 カタカナ, 你好世界 商品说明, 상품 설명 안녕하세요, Xin chào thế giới, Kiswahili habari, አማርኛ, ქართული, հայերեն"
).split(" ")
EMOJI = [
    "😊", "👍🏽", "👨‍👩‍👧", "🏳️‍🌈", "👩🏽‍🚀", "❤️", "🇩🇪", "🇯🇵🇫🇷", "1️⃣", "©️", "🧑‍🤝‍🧑", "☕", "🫠", "\u200d", "\ufe0f",
]
CODE = [
    "for (int i = 0; i < n; ++i) {\n\treturn x[i];\n}", "def f(x):\n    return {k: v for k, v in x.items()}\n", "SELECT * FROM t WHERE a<>'b';",
    "<div class=\"x\"><b>bold</b> &amp; <i>it</i></div>", "<table>\n<tr><td>1</td></tr>\n</table>", "https://example.org/?q=a%20b#c",
    "{\"a\": [1, 2.50, -3e8, null]}", "\\alpha_{i}^{2} \\to \\infty", "0x1F 1,234,567.89 3.14159265358979", "C:\\temp\\new", "a\r\nb\rc",
]
SPACES = [" ", "  ", "   ", "     ", " " * 33, "\n", "\n\n", "\n\n\n", "\n" * 32, "\n" * 64, "\t", "\t\t\t", "\t" * 40, "\u00a0", "\u2003", "\u3000",
          "\u2028", "\u0085", "\u200b", "\ufeff", "\v", "\f", "\r\n", "▁", "▁▁", "▁ ▁", " ▁▁▁", "▁" * 40]
CONTROL_CHARACTERS = ["\x00", "\x01", "\x1f", "\x7f", "\x80", "\ufffd", "\ufffe", "\U0010ffff"]


def real_tokenizer():
    assets = os.environ.get("GEMTUNE_TEST_ASSETS")
    if not assets:
        pytest.skip("GEMTUNE_TEST_ASSETS is not set: Gemma's tokenizer.json may not be shipped with the tests")
    return lzma.decompress((pathlib.Path(assets) / "gemma3-tokenizer" / "tokenizer.json.xz").read_bytes())


@pytest.fixture(scope="module", params=["gemma", "demo"])
def pair(request, tmp_path_factory):
    """(path of tokenizer.json, the reference's tokenizer)"""
    folder = tmp_path_factory.mktemp(request.param)
    path = folder / "tokenizer.json"
    if request.param == "gemma":
        path.write_bytes(real_tokenizer())
    else:
        path.write_bytes((SOURCE / "examples" / "fashion" / "base" / "tokenizer.json").read_bytes())
    return path, tokenizers.Tokenizer.from_file(str(path))


def ask(path, requests):
    text = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run([TOOL, path], input=text, capture_output=True, text=True, check=False,
                          env=dict(os.environ, XDG_CACHE_HOME=str(path.parent)))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.rstrip("\n").split("\n")]


def usable(code):
    return not 0xD800 <= code < 0xE000 and unicodedata.category(chr(code)) != "Cs"


def strings(reference, count, seed):
    """Texts of many scripts, mixtures of them with added tokens, white space, emoji, code and lone characters."""
    choose = random.Random(seed)
    vocabulary = reference.get_vocab()
    added = [token.content for token in reference.get_added_tokens_decoder().values()]
    pieces = sorted(vocabulary)
    texts = ["", " ", "  ", "\n", "a", "<", "<bos", "<start_of_turn>user\nHi<end_of_turn>\n", "<start_of_image>" * 3, "e\u0301", "é"]
    texts += WORDS + EMOJI + CODE + SPACES + CONTROL_CHARACTERS
    for begin, end in BLOCKS:
        characters = [chr(code) for code in range(begin, end) if usable(code)]
        texts.append("".join(characters[:64]))
        for _ in range(6):
            texts.append("".join(choose.choices(characters, k=choose.randint(1, 40))))
            texts.append(" ".join("".join(choose.choices(characters, k=choose.randint(1, 6))) for _ in range(8)))
    kinds = [WORDS, EMOJI, CODE, SPACES, CONTROL_CHARACTERS, added, pieces, ["<", ">", "</", "<unused", "<0x41>", "start_of_turn>", " "]]
    while len(texts) < count:
        parts = []
        for _ in range(choose.randint(1, 24)):
            kind = choose.choices(kinds, weights=[6, 2, 1, 6, 1, 4, 6, 2])[0]
            part = choose.choice(kind)
            if choose.random() < 0.1:
                part = part[: choose.randint(0, len(part))]
            parts.append(part)
        texts.append(choose.choice(["", " ", " ", "\n"]).join(parts))
    return texts


def test_ids_are_the_references_for_many_scripts(pair):
    path, reference = pair
    texts = strings(reference, 3000, seed=1)
    assert len(texts) >= 3000
    answers = ask(path, [{"text": text} for text in texts])
    differing = [text for text, answer in zip(texts, answers)
                 if answer["ids"] != reference.encode(text, add_special_tokens=False).ids]
    assert differing == []


def test_ranges_tile_the_text(pair):
    path, reference = pair
    texts = strings(reference, 900, seed=2)
    for text, answer in zip(texts, ask(path, [{"text": text} for text in texts])):
        places = [0] + [end for _, end in answer["ranges"]]
        assert [begin for begin, _ in answer["ranges"]] == places[:-1], text
        assert places[-1] == len(text.encode()), text


def test_long_words_are_the_references(pair):
    path, reference = pair
    texts = ["a" * 4097, "ab" * 3000, "the" * 2500, " " * 5000, "\n" * 5000, "▁" * 3000, "상품" * 900, "e\u0301" * 1000, "😊" * 1500]
    for text, answer in zip(texts, ask(path, [{"text": text} for text in texts])):
        assert answer["ids"] == reference.encode(text, add_special_tokens=False).ids, text[:20]


def test_decoded_text_is_the_references(pair):
    path, reference = pair
    choose = random.Random(3)
    size = reference.get_vocab_size()
    byte_ids = [reference.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    special = [i for i, token in reference.get_added_tokens_decoder().items() if token.special]
    sequences = [[], byte_ids]
    for _ in range(1500):
        length = choose.randint(1, 30)
        kinds = choose.choices([range(size), byte_ids, special, range(min(size, 300))], weights=[4, 4, 1, 2], k=length)
        sequences.append([choose.choice(kind) for kind in kinds])
    for text in strings(reference, 900, seed=4):
        sequences.append(reference.encode(text, add_special_tokens=False).ids)
    for ids, answer in zip(sequences, ask(path, [{"ids": ids} for ids in sequences])):
        assert answer["decoded"] == reference.decode(ids, skip_special_tokens=False), ids
        assert answer["decoded_without_special"] == reference.decode(ids, skip_special_tokens=True), ids


def test_typed_control_strings_never_become_control_tokens(pair):
    path, reference = pair
    special = {i: token.content for i, token in reference.get_added_tokens_decoder().items() if token.special}
    choose = random.Random(5)
    texts = list(special.values())
    for text in strings(reference, 900, seed=5):
        place = choose.randint(0, len(text))
        texts.append(text[:place] + choose.choice(texts[: len(special)]) + text[place:])
    answers = ask(path, [{"text": text, "may_hold_control": False} for text in texts])
    assert len(texts) > 900
    for text, answer in zip(texts, answers):
        assert not set(answer["ids"]) & set(special), text
        assert reference.decode(answer["ids"], skip_special_tokens=False) == text.replace("▁", " "), text


def variant(change, folder):
    """(path, reference) of the demo's tokenizer, changed."""
    content = json.loads((SOURCE / "examples" / "fashion" / "base" / "tokenizer.json").read_text())
    change(content)
    changed = folder / "tokenizer.json"
    changed.write_text(json.dumps(content, sort_keys=change is sorted_keys))
    return changed, tokenizers.Tokenizer.from_file(str(changed))


def merges_as_lines(content):
    content["model"]["merges"] = [" ".join(merge) for merge in content["model"]["merges"]]


def sorted_keys(content):
    content["truncation"] = None  # only the order of the members changes: merges before vocab


def normalizer_in_a_sequence(content):
    content["normalizer"] = {"type": "Sequence", "normalizers": [content["normalizer"]]}
    content["pre_tokenizer"] = None


def no_normalizer(content):
    content["normalizer"] = None


def no_byte_fallback(content):
    content["model"]["byte_fallback"] = False


def unfused_unknown(content):
    content["model"]["byte_fallback"] = False
    content["model"]["fuse_unk"] = False


def normalized_added_tokens(content):
    for token in content["added_tokens"]:
        token["normalized"] = token["content"].startswith("\n") or token["content"] == "<mask>"
    content["added_tokens"].append(dict(content["added_tokens"][-1], id=content["added_tokens"][-1]["id"] + 1, content="x y", special=False,
                                        normalized=True))


@pytest.mark.parametrize("change", [merges_as_lines, sorted_keys, normalizer_in_a_sequence, no_normalizer, no_byte_fallback,
                                    unfused_unknown, normalized_added_tokens])
def test_other_files_of_the_same_kind(change, tmp_path):
    path, reference = variant(change, tmp_path)
    texts = strings(reference, 1200, seed=6) + ["x y", "ax yb", "x  y", "x▁y", "x y x y\n\nx y"]
    answers = ask(path, [{"text": text} for text in texts])
    differing = [text for text, answer in zip(texts, answers)
                 if answer["ids"] != reference.encode(text, add_special_tokens=False).ids]
    assert differing == []
