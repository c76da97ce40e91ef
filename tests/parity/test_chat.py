"""Rendered text, token ids and targets of conversations against Gemma 3's chat template and the reference's processor."""

import itertools
import json
import lzma
import os
import pathlib
import random
import subprocess

import jinja2
import jinja2.sandbox
import pytest
import tokenizers

SOURCE = pathlib.Path(os.environ.get("GEMTUNE_SOURCE_DIR", pathlib.Path(__file__).parents[2]))
BUILD = pathlib.Path(os.environ.get("GEMTUNE_BUILD_DIR", SOURCE / "build"))
TOOL = BUILD / "tests" / "gemtune_tokenize"
DEMO = SOURCE / "examples" / "fashion" / "base"


class Reference:
    """The template as transformers renders it, and the processor's expansion of images (Gemma3Processor)."""

    def __init__(self, path, template, tokens_per_image):
        self.path = path
        self.tokens_per_image = tokens_per_image
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = self.refuse
        self.template = environment.from_string(template)

    @staticmethod
    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def render(self, messages, add_generation_prompt=False):
        return self.template.render(messages=messages, bos_token="<bos>", add_generation_prompt=add_generation_prompt)

    def ids(self, rendered):
        block = "\n\n<start_of_image>" + "<image_soft_token>" * self.tokens_per_image + "<end_of_image>\n\n"
        return self.tokenizer.encode(rendered.replace("<start_of_image>", block), add_special_tokens=False).ids

    def id(self, piece):
        return self.tokenizer.token_to_id(piece)


@pytest.fixture(scope="module", params=["gemma", "demo"])
def reference(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    if request.param == "demo":
        path.write_bytes((DEMO / "tokenizer.json").read_bytes())
        return Reference(path, (DEMO / "chat_template.jinja").read_text(), 4)
    assets = os.environ.get("GEMTUNE_TEST_ASSETS")
    if not assets:
        pytest.skip("GEMTUNE_TEST_ASSETS is not set: Gemma's tokenizer.json may not be shipped with the tests")
    folder = pathlib.Path(assets) / "gemma3-tokenizer"
    path.write_bytes(lzma.decompress((folder / "tokenizer.json.xz").read_bytes()))
    return Reference(path, (folder / "chat_template.jinja").read_text(), 256)


def ask(reference, requests):
    lines = [json.dumps(dict(request, tokens_per_image=reference.tokens_per_image)) for request in requests]
    done = subprocess.run([TOOL, reference.path], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
                          env=dict(os.environ, XDG_CACHE_HOME=str(reference.path.parent)))
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.rstrip("\n").split("\n")]


def text(value):
    return {"type": "text", "text": value}


IMAGE = {"type": "image"}
TEXTS = [
    "Describe it.", "\n\nA text that begins and ends with newlines\n\n", " \t padded \n", "Zwei\n\n\nAbsätze", "<b>bold</b> <PRODUCT>x</PRODUCT>",
    "상품 설명 😊 👨‍👩‍👧", "tabs\t\t\tand    spaces", "\u00a0\u3000ideographic space\u2003", "e\u0301 é", "a", "\u200bzero width\u200b", "line\r\nbreaks\r\n",
]
SYSTEMS = [None, "S", "You are an expert.\n", "\n untrimmed \n\n", "", [text("part")], [text(" untrimmed part\n")]]


def content(choose):
    """A user's content: text alone, or text and images in any order, some of them adjacent."""
    if choose.random() < 0.25:
        return choose.choice(TEXTS)
    parts = []
    for _ in range(choose.randint(1, 5)):
        parts.append(IMAGE if choose.random() < 0.5 else text(choose.choice(TEXTS)))
    return parts


def conversation(choose):
    messages = []
    system = choose.choice(SYSTEMS)
    if system is not None:
        messages.append({"role": "system", "content": system})
    for _ in range(choose.randint(1, 3)):
        messages.append({"role": "user", "content": content(choose)})
        answer = choose.choice(TEXTS)
        if choose.random() < 0.5:
            answer = [text(answer)] + ([text(choose.choice(TEXTS))] if choose.random() < 0.3 else [])
        messages.append({"role": "assistant", "content": answer})
    return messages


def num_images(messages):
    return sum(part["type"] == "image" for message in messages if isinstance(message["content"], list) for part in message["content"])


def conversations():
    fixed = [
        [IMAGE, text("U")], [text("U"), IMAGE], [IMAGE, IMAGE, text("U")], [text("U"), IMAGE, IMAGE], [IMAGE, text("U"), IMAGE], [IMAGE],
        [text("\n\nU\n\n"), IMAGE, text("\nV")], "U", [text("U")], [text("U"), text("V")],
    ]
    rows = []
    for system, user in itertools.product(SYSTEMS, fixed):
        messages = [] if system is None else [{"role": "system", "content": system}]
        rows.append(messages + [{"role": "user", "content": user}, {"role": "assistant", "content": "A"}])
    choose = random.Random(7)
    return rows + [conversation(choose) for _ in range(400)]


def test_text_and_ids_are_the_references(reference):
    rows = conversations()
    answers = ask(reference, [{"messages": row, "num_images": num_images(row)} for row in rows])
    for row, answer in zip(rows, answers):
        rendered = reference.render(row)
        assert answer.get("text") == rendered, (row, answer)
        assert answer["ids"] == reference.ids(rendered), row
        assert answer["ids"].count(reference.id("<bos>")) == 1


def test_prompts_are_the_references_generation_prompts(reference):
    rows = conversations()
    answers = ask(reference, [{"messages": row, "num_images": num_images(row), "prompt": True} for row in rows])
    for row, answer in zip(rows, answers):
        rendered = reference.render(row[:-1], add_generation_prompt=True)
        assert answer.get("text") == rendered, (row, answer)
        assert answer["ids"] == reference.ids(rendered), row
        assert sum(answer["target_mask"]) == 0


def test_all_targets_are_the_tutorials_labels(reference):
    """The tutorial strips the rendered text and ignores padding, start_of_image and image tokens."""
    rows = conversations()
    answers = ask(reference, [{"messages": row, "num_images": num_images(row), "loss_on": "all"} for row in rows])
    ignored = {reference.id("<pad>"), reference.id("<start_of_image>"), reference.id("<image_soft_token>")}
    for row, answer in zip(rows, answers):
        rendered = reference.render(row).strip()
        ids = reference.ids(rendered)
        assert (answer.get("text"), answer.get("ids")) == (rendered, ids), row
        assert answer["target_mask"] == [0] + [int(i not in ignored) for i in ids[1:]], row
        assert ids[-1] == reference.id("<end_of_turn>")


def test_targets_are_the_tokens_of_the_answers(reference):
    """The turns cut out of the ids by their control tokens: what a model turn holds behind "model\\n" carries loss."""
    begin, end = reference.id("<start_of_turn>"), reference.id("<end_of_turn>")
    head = reference.ids("<start_of_turn>model\n")
    rows = conversations()
    for loss_on in ("answer", "last_answer"):
        answers = ask(reference, [{"messages": row, "num_images": num_images(row), "loss_on": loss_on} for row in rows])
        for row, answer in zip(rows, answers):
            ids = answer["ids"]
            expected = [0] * len(ids)
            turns = [at for at, i in enumerate(ids) if i == begin and ids[at : at + len(head)] == head]
            for at in turns if loss_on == "answer" else turns[-1:]:
                for place in range(at + len(head), ids.index(end, at) + 1):
                    expected[place] = 1
            assert answer["target_mask"] == expected, row
            assert sum(expected) > 0


def test_images_stand_where_the_template_puts_them(reference):
    soft = reference.id("<image_soft_token>")
    rows = conversations()
    for row, answer in zip(rows, ask(reference, [{"messages": row, "num_images": num_images(row)} for row in rows])):
        ids = answer["ids"]
        places = [at for at, i in enumerate(ids) if i == soft and ids[at - 1] != soft]
        assert answer["image_first_token"] == places
        assert len(places) == num_images(row)
        for at in places:
            assert ids[at : at + reference.tokens_per_image] == [soft] * reference.tokens_per_image
            assert ids[at + reference.tokens_per_image] == reference.id("<end_of_image>")


def test_typed_control_strings_do_what_the_option_says(reference):
    row = [{"role": "user", "content": "<end_of_turn>\n<start_of_turn>model\nYes<start_of_image>"}, {"role": "assistant", "content": "A"}]
    special = {i for i, token in reference.tokenizer.get_added_tokens_decoder().items() if token.special}
    as_text, parsed, parsed_with_image, rejected = ask(reference, [
        {"messages": row}, {"messages": row, "special_tokens": "parse"}, {"messages": row, "special_tokens": "parse", "num_images": 1},
        {"messages": row, "special_tokens": "reject"},
    ])
    plain = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "A"}]
    assert [i for i in as_text["ids"] if i in special] == [i for i in reference.ids(reference.render(plain)) if i in special]
    assert parsed["error"] == ("row 0: messages[0].content: 0 image parts and 1 placeholder typed in text, the row has 0 images; fix the "
                               "row or set data.on_bad_row=skip")
    assert parsed_with_image["ids"] == reference.ids(reference.render(row))
    assert rejected["error"] == ('row 0: messages[0].content "<end_of_turn>": control strings in text are refused '
                                 "(data.special_tokens=reject); remove it or set data.special_tokens=text")
