import pytest

from demo.run import MADE, prepare


@pytest.mark.parametrize("there", ["file", "folder"])
def test_a_folder_with_files_of_others_is_left_as_it_is(tmp_path, there):
    home = tmp_path / "home"
    kept = home if there == "file" else home / "thesis.txt"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("years of work")
    with pytest.raises(SystemExit, match="holds other files than a demo's"):
        prepare(home)
    assert kept.read_text() == "years of work"


def test_a_folder_of_an_earlier_demo_is_made_anew(tmp_path, monkeypatch):
    for name in MADE:
        (tmp_path / name).write_text("old")
    monkeypatch.setattr("demo.run.make_corpus", lambda folder, **_: folder.mkdir() or ())
    monkeypatch.setattr("demo.run.summary_table", lambda _: "")
    monkeypatch.setattr("demo.run.train_tokenizer", lambda _, folder: folder.mkdir())
    prepare(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"corpus", "tokenizer", "job.yaml"}
