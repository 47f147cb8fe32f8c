"""The experiments' command, at sizes where it takes seconds, and the measures behind it."""

import gzip
import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from lowrank_expm.experiments import __main__ as command  # noqa: E402
from lowrank_expm.experiments import data, measure, models, report, studies, training  # noqa: E402


@pytest.mark.parametrize("study", ["rank", "conditioning"])
def test_command_prints_a_table_and_writes_json_and_a_picture(study, tmp_path, capsys):
    arguments = [study, "--quick", "--seeds", "1", "--out", str(tmp_path)]
    assert command.main(arguments) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / f"{study}.json").read_text())
    assert found["title"] in printed
    assert {row["kind"] for row in found["rows"]} == set(models.KINDS)
    assert (tmp_path / f"{study}.png").read_bytes()[:4] == b"\x89PNG"


def test_the_same_command_gives_the_same_numbers(tmp_path, capsys):
    for folder in ("a", "b"):
        command.main(["rank", "--quick", "--seeds", "1", "--out", str(tmp_path / folder)])
    capsys.readouterr()
    first, second = (json.loads((tmp_path / f / "rank.json").read_text()) for f in "ab")
    assert first["rows"] == second["rows"]


def test_unknown_study(capsys):
    assert command.main(["ranks"]) == 2
    assert "no study is called ranks" in capsys.readouterr().err


def test_help_names_every_study(capsys):
    with pytest.raises(SystemExit):
        command.main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name} " in printed for name in studies.STUDIES)


def plan(**changes):
    recipe = training.Recipe(width=8, heads=2, epochs=1, batch=400)
    given = studies.Plan(True, 1, None, recipe, lambda what: None)
    return given._replace(**changes)


def test_orthogonality_study():
    rows = studies.orthogonality(plan()).rows
    assert {row["dtype"] for row in rows} == {"float32", "float64"}
    worst = max(max(row["defect / u at first"], row["defect / u after training"]) for row in rows)
    assert worst <= 80 * (2 * 4) ** 0.5


@pytest.mark.parametrize("study", [studies.training, studies.alpha])
def test_training_studies(study, monkeypatch, tmp_path):
    digits = data.bundled()
    few = digits._replace(images=digits.images[:400], labels=digits.labels[:400])
    monkeypatch.setattr(studies, "bundled", lambda: few)
    result = study(plan())
    for row in result.rows:
        assert 0 <= row["test accuracy"] <= 1
    report.save(result, tmp_path, {})
    assert (tmp_path / f"{result.name}.png").read_bytes()[:4] == b"\x89PNG"


def test_kinds_have_the_same_budget_and_skipless_ones_the_same_start():
    counts, starts = {}, {}
    for kind in models.KINDS:
        torch.manual_seed(0)
        model = models.Classifier(kind, 2, 16, 2, 2, 8, 0.03)
        counts[kind] = models.parameters(model)
        starts[kind] = model.blocks[0].state_dict().get("attention.in_proj_weight")
    assert max(counts.values()) < 1.05 * min(counts.values())
    orthogonal, softmax, _ = starts.values()
    assert orthogonal.shape == softmax.shape


def test_softmax_attention_is_the_definition():
    layer = models.SoftmaxSelfAttention(12, 3).double()
    x = torch.randn(9, 12, dtype=torch.float64)
    q, k, v = layer._project(x).split(4, dim=-1)
    y = torch.softmax(q @ k.mT, dim=-1) @ v
    expected = layer.out_proj(y.transpose(0, 1).flatten(1))
    torch.testing.assert_close(layer(x), expected, rtol=0, atol=1e-12)
    reference = torch.nn.functional.scaled_dot_product_attention(q * 2, k, v)  # q had 1/√d
    torch.testing.assert_close(layer.mix(layer._project(x), None), reference, rtol=0, atol=1e-12)


def test_effective_rank():
    assert studies.effective_rank(np.eye(7)) == pytest.approx(7)
    assert studies.effective_rank(np.ones((5, 4))) == pytest.approx(1)


def test_jacobian_of_a_layer():
    layer = torch.nn.Linear(3, 3).double()
    y, J = studies.jacobian(layer, torch.randn(4, 3, dtype=torch.float64))
    assert y.shape == (4, 3)
    expected = np.kron(np.eye(4), layer.weight.detach().numpy())
    np.testing.assert_allclose(J, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("kind", measure.KINDS)
def test_measure(kind):
    torch.manual_seed(0)
    found = measure.measure(kind, 130)
    assert found["seconds"] > 0
    assert found["MiB"] >= 0


def mnist_like(folder, packed, count=6):
    """A folder with four files as MNIST's, of random pixels."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (count, 28, 28), np.uint8)
    labels = (np.arange(count) % 10).astype(np.uint8)
    for part in ("train", "t10k"):
        for name, a in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
            head = bytes([0, 0, 8, a.ndim]) + np.array(a.shape, ">i4").tobytes()
            raw = head + a.tobytes()
            path = folder / (f"{part}-{name}.gz" if packed else f"{part}-{name}")
            path.write_bytes(gzip.compress(raw) if packed else raw)
    return labels


@pytest.mark.parametrize("packed", [True, False])
def test_mnist_files(packed, tmp_path):
    labels = mnist_like(tmp_path, packed)
    digits = data.mnist(tmp_path)
    assert digits.images.shape == (6, 28, 28)
    assert digits.labels.tolist() == labels.tolist()
    assert float(digits.images.mean()) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("packed", [True, False])
def test_training_on_mnist_files(packed, tmp_path, capsys):
    """The whole command: two depths of each kind, one seed, one epoch."""
    mnist_like(tmp_path, packed, count=70)
    out = tmp_path / "results"
    options = ["--quick", "--epochs", "1", "--seeds", "1", "--threads", "1", "--out", str(out)]
    before = torch.get_num_threads()
    try:
        assert command.main(["training", "--mnist", str(tmp_path), *options]) == 0
    finally:
        torch.set_num_threads(before)
    found = json.loads((out / "training.json").read_text())
    assert found["title"] in capsys.readouterr().out
    assert found["settings"]["mnist"] == str(tmp_path)
    assert {row["kind"] for row in found["rows"]} == set(models.KINDS)
    # A linear map of 7 × 7 pixels to 32, and one place for each of 16 patches.
    assert all(row["parameters"] > 49 * 32 + 16 * 32 for row in found["rows"])
    assert all(np.isfinite(row["training loss"]) for row in found["rows"])
    assert (out / "training.png").exists()


def test_mnist_files_that_are_missing_or_damaged(tmp_path, capsys):
    (tmp_path / "train-images-idx3-ubyte").write_bytes(bytes([0, 0, 8, 3]) + bytes(10))
    for folder, message in ((tmp_path, "is cut off"), (tmp_path / "no", "has no file train-im")):
        assert command.main(["training", "--mnist", str(folder)]) == 2
        assert message in capsys.readouterr().err.replace("\n", " ")


def spoil(path, how):
    """A gzipped file made worse."""
    raw = path.read_bytes()
    path.write_bytes({"cut off": raw[:-20], "damaged": raw[:30] + b"?" * 9 + raw[39:]}[how])


@pytest.mark.parametrize("how", ["cut off", "damaged"])
def test_gzipped_files_that_are_damaged_are_named(how, tmp_path):
    mnist_like(tmp_path, True)
    spoil(tmp_path / "t10k-images-idx3-ubyte.gz", how)
    with pytest.raises(OSError, match=r"t10k-images-idx3-ubyte\.gz is not a gzipped file, or is"):
        data.mnist(tmp_path)


def write(folder, name, a, shape=None):
    """A file in the IDX format, which may claim another shape."""
    head = bytes([0, 0, 8, a.ndim]) + np.array(shape or a.shape, ">i4").tobytes()
    (folder / name).write_bytes(head + a.astype(np.uint8).tobytes())


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("train-images-idx3-ubyte", np.zeros((6, 28)), "must be .count, side, side."),
        ("train-images-idx3-ubyte", np.zeros((6, 28, 27)), "must be .count, side, side."),
        ("train-images-idx3-ubyte", np.zeros((6, 6, 6)), "a side of 7 or more"),
        ("train-images-idx3-ubyte", np.zeros((6, 14, 14)), "must be of one size"),
        ("train-labels-idx1-ubyte", np.zeros(5), r"ubyte \(5,\); they must be"),
        ("t10k-labels-idx1-ubyte", np.full(6, 10), "t10k-labels-idx1-ubyte has a label 10"),
        ("train-images-idx3-ubyte", np.full((6, 28, 28), 7), "all pixels of train-images.* are 7"),
    ],
)
def test_mnist_files_that_do_not_belong_together(name, values, message, tmp_path):
    mnist_like(tmp_path, False)
    write(tmp_path, name, values)
    with pytest.raises(OSError, match=message):
        data.mnist(tmp_path)


def test_mnist_files_without_an_image_or_with_a_negative_number(tmp_path):
    mnist_like(tmp_path, False)
    write(tmp_path, "t10k-images-idx3-ubyte", np.zeros(2), (-1, -2))
    with pytest.raises(OSError, match="t10k-images-idx3-ubyte is not an IDX file"):
        data.mnist(tmp_path)
    write(tmp_path, "t10k-images-idx3-ubyte", np.zeros((0, 28, 28)))
    write(tmp_path, "t10k-labels-idx1-ubyte", np.zeros(0))
    with pytest.raises(OSError, match=r"shape \(0, 28, 28\)"):
        data.mnist(tmp_path)


@pytest.mark.parametrize("option", ["--seeds", "--epochs", "--threads"])
@pytest.mark.parametrize("value", ["0", "-3", "two"])
def test_counts_that_are_not_positive(option, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(["rank", f"{option}={value}"])
    assert stopped.value.code == 2
    assert f"argument {option}: {value} is not a positive whole number" in capsys.readouterr().err


def test_images_for_a_study_without_any(tmp_path, capsys):
    assert command.main(["rank", "--mnist", str(tmp_path)]) == 2
    assert "--mnist is for the studies alpha and training only" in capsys.readouterr().err


def test_files_are_looked_at_before_the_first_study(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(studies.STUDIES, "rank", None)
    options = ["--mnist", str(tmp_path), "--out", str(tmp_path / "out")]
    assert command.main(["rank", "training", *options]) == 2
    assert "has no file train-images" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_found_before_the_study(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(studies.STUDIES, "rank", None)
    (tmp_path / "file").touch()
    assert command.main(["rank", "--out", str(tmp_path / "file")]) == 2
    assert "file" in capsys.readouterr().err


def test_an_interrupted_study_ends_in_a_line(monkeypatch, tmp_path, capsys):
    def interrupted(plan):
        raise KeyboardInterrupt

    monkeypatch.setitem(studies.STUDIES, "rank", interrupted)
    assert command.main(["rank", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.strip().endswith("interrupted")
