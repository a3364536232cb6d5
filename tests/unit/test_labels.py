"""Files of labels: what is read of them, and what is said of those that are not what they seem."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.data.index.label_file import read_labels
from paceline.errors import DataError
from paceline.settings.data import Files


def read(folder: Path, text: str, name: str = "labels.csv") -> dict[str, str | int]:
    (folder / name).write_bytes(text.encode())
    labels = read_labels(Files(name="images", labels=name), folder)
    assert labels is not None
    return labels.classes


def message_of(folder: Path, text: str, name: str = "labels.csv") -> str:
    with pytest.raises(DataError) as caught:
        read(folder, text, name)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{folder}/{name}")


@pytest.mark.parametrize(
    "heading",
    ["file,class", "filepath,x", "file_path,x", "image_path,label", "image_name,y", "img,y", "IMG_PATH,y", "images,y",
     "filenames,y", "what it is,number"],
)  # fmt: skip
def test_a_heading_is_no_image(tmp_path: Path, heading: str) -> None:
    assert read(tmp_path, f"{heading}\n1.jpg,3\n2.jpg,-1\n") == {"1.jpg": 3, "2.jpg": -1}


def test_a_first_line_with_a_class_like_the_others_is_an_image(tmp_path: Path) -> None:
    assert read(tmp_path, "1.jpg,cat\n2.jpg,dog\n") == {"1.jpg": "cat", "2.jpg": "dog"}
    assert read(tmp_path, "1.jpg,cat\n2.jpg,7\n3.jpg,dog") == {"1.jpg": "cat", "2.jpg": "7", "3.jpg": "dog"}
    assert read(tmp_path, "1.jpg,cat") == {"1.jpg": "cat"}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_other_systems_are_read(tmp_path: Path, end: str) -> None:
    lines = [
        "\ufefffile,class",
        '"a, b.jpg","say ""cat"""',
        "",
        " /x/2.jpg/ , dog ,more",
        ",,",
        "2.jpg,dog",
        "2.jpg,dog",
    ]
    expected = {"a, b.jpg": 'say "cat"', "x/2.jpg": "dog", "2.jpg": "dog"}
    assert read(tmp_path, end.join(lines)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.jpg,3\n2.jpg,\n", ":2: '2.jpg' has no class; write one, or remove the line"),
        ("1.jpg,3\n,4\n", ":2: expected 'file,class', found ',4'"),
        ("1.jpg,3\n2.jpg,4\n1.jpg,5\n", ":3: '1.jpg' has two classes, '3' and '5'; remove one of them"),
        ('1.jpg,3\n2.jpg,"4\n3.jpg,5\n', ":2: unexpected end of data; expected 'file,class', found '2.jpg,\"4'"),
        ('1.jpg,3\n"2.jpg,4\n"3.jpg,5\n', ":2: unexpected end of data; expected 'file,class', found '\"2.jpg,4'"),
        ('"1.jpg"x,3\n', ":1: ',' expected after '\"'; expected 'file,class', found '\"1.jpg\"x,3'"),
        (f"1.jpg,3\n{'x' * 200_000}\n", f"field limit (131072); expected 'file,class', found '{'x' * 80}...'"),
        (f"1.jpg,3\n{'x' * 500}\n", f":2: expected 'file,class', found '{'x' * 80}...'"),
        ("cat,1.jpg\ndog,2.JPG\n", ":1: the files are where the classes should be; write lines of 'file,class'"),
        (f"1.jpg,{'9' * 5000}\n", f":1: '{'9' * 80}...', the class of '1.jpg', is too large a number"),
    ],
)
def test_a_line_that_is_wrong_is_named(tmp_path: Path, text: str, message: str) -> None:
    assert message_of(tmp_path, text).endswith(message)


def test_a_number_with_two_signs_is_a_name(tmp_path: Path) -> None:
    assert read(tmp_path, "1.jpg,3\n2.jpg,--5\n") == {"1.jpg": "3", "2.jpg": "--5"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"1.jpg": "cat", "2.jpg": ""}', ": '2.jpg' has no class"),
        ('{"1.jpg": "cat", "1.jpg": "dog"}', ": '1.jpg' has two classes, 'cat' and 'dog'"),
        ('{"1.jpg": true}', ": expected a JSON map"),
        ('{"1.jpg": {"cat": 1}}', ": expected a JSON map"),
        (f'{{"1.jpg": {10**30}}}', f": '{10**30}', the class of '1.jpg', is too large a number"),
        ("{}", ": the file of labels (data.labels) is empty"),
    ],
)
def test_a_map_that_is_wrong_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message_of(tmp_path, text, "labels.json").startswith(message)


@pytest.mark.parametrize(
    "text",
    [
        "file\tclass\n1.jpg\tcat\n2.jpg\tdog\n",
        "file;class\n1.jpg;cat\n2.jpg;dog\n",
        "1.jpg;cat;0,5\n2.jpg;dog;0,7\n",
        ",file,class\n0,1.jpg,cat\n1,2.jpg,dog\n",
        "Unnamed: 0,image,what\n0,1.jpg,cat\n1,2.jpg,dog\n",
        "label,width,filename\ncat,7,1.jpg\ndog,8,2.jpg\n",
        "1.jpg cat\n2.jpg  dog\n",
        "1.jpg\tcat\t0\t0\n2.jpg\tdog\t1\t1\n",
        ".\\1.jpg,cat\n.\\2.jpg,dog\n",
    ],
)
def test_tables_of_other_programs_are_read(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, text) == {"1.jpg": "cat", "2.jpg": "dog"}


def test_a_semicolon_in_a_name_parts_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "a;b.jpg,cat\nc.jpg,dog\n") == {"a;b.jpg": "cat", "c.jpg": "dog"}
    assert read(tmp_path, "a, b.jpg\tcat\nc.jpg\tdog\n", "labels.tsv") == {"a, b.jpg": "cat", "c.jpg": "dog"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("labels.json", '{"cat": ["1.jpg"], "dog": ["2.jpg"]}'),
        ("labels.json", '[{"id": 3, "path": "1.jpg", "label": "cat"}, {"path": "2.jpg", "label": "dog"}]'),
        ("labels.jsonl", '{"file_name": "1.jpg", "class": "cat"}\n{"file_name": "2.jpg", "class": "dog"}\n'),
    ],
)
def test_json_of_other_programs_is_read(tmp_path: Path, name: str, text: str) -> None:
    assert read(tmp_path, text, name) == {"1.jpg": "cat", "2.jpg": "dog"}


def test_absolute_paths_below_the_data_folder_are_those_of_the_index(tmp_path: Path) -> None:
    assert read(tmp_path, f"{tmp_path}/x/1.jpg,cat\n./2.jpg,dog\n") == {"x/1.jpg": "cat", "2.jpg": "dog"}
