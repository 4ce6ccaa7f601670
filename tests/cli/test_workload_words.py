"""`module:factory key=value`: what is taken, and what is said when the user's words or code are wrong."""

from __future__ import annotations

import importlib
import sys
import textwrap
import types

import pytest

from rematplan.cli import userframe
from rematplan.cli import workloads as workload_words
from rematplan.cli.workloads import load_workload, parse_keywords, parse_value
from rematplan.errors import InputError

GOOD = """
    import jax, jax.numpy as jnp
    import rematplan as rp

    def make(*, features: int = 8, batch: int = 4, name="small"):
        loss = lambda w, x: (jnp.tanh(x @ w) ** 2).sum()
        w = jax.ShapeDtypeStruct((features, features), "float32")
        return rp.Workload(loss, w, jax.ShapeDtypeStruct((batch, features), "float32"), name=name)

    not_callable = 3
"""


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12", 12),
        ("1_024", 1024),
        ("-3", -3),
        ("1e-3", 1e-3),
        ("true", True),
        ("False", False),
        ("none", None),
        ("bfloat16", "bfloat16"),
        ("'12'", "12"),
        ("[1, 2]", [1, 2]),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_values(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_keywords_refuse_what_is_no_assignment_or_given_twice():
    assert parse_keywords(["blocks=2", "dtype=float32"]) == {"blocks": 2, "dtype": "float32"}
    for words in (["blocks"], ["=2"], ["2x=3"], ["a=1", "a=2"]):
        with pytest.raises(InputError):
            parse_keywords(words)


def test_a_file_with_sizes(factory_file):
    work = load_workload(f"{factory_file(GOOD)}:make", ["features=16", "name=wide"])
    assert work.name == "wide"
    assert [leaf.shape for leaf in work.lift().leaves] == [(16, 16), (4, 16)]


def test_a_module_in_the_current_folder(factory_file, monkeypatch):
    monkeypatch.chdir(factory_file(GOOD).parent)
    assert load_workload("users_model:make", []).name == "small"


@pytest.mark.parametrize(
    ("package", "module", "complaint"),
    [
        ("import users_missing", "", "raised ModuleNotFoundError: No module named 'users_missing' ({package}:1 in"),
        ("", "import users_missing", "raised ModuleNotFoundError: No module named 'users_missing' ({module}:1 in"),
        ("import users_pkg.other", "", "No module named 'users_pkg.other' ({package}:1 in"),
        ("raise ImportError('old')", "", "importing users_pkg.model raised ImportError: old ({package}:1 in"),
        ("1 / 0", "", "importing users_pkg.model raised ZeroDivisionError: division by zero ({package}:1 in"),
        ("def x(:", "", "importing users_pkg.model failed: invalid syntax ({package}:1)"),
        ("", None, "there is no module 'users_pkg.model'"),
        (None, None, "there is no module 'users_pkg.model'"),
    ],
)
def test_what_a_package_lacks_is_not_the_module_that_was_asked_for(
    cli, tmp_path, factory_file, monkeypatch, package, module, complaint
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_pkg").mkdir()
    paths = {"package": "users_pkg/__init__.py", "module": "users_pkg/model.py"}
    for source, path in ((package, paths["package"]), (module, paths["module"])):
        if source is not None:
            factory_file(source, path)
    result = cli("inspect", "users_pkg.model:make")
    assert result.code == 2
    assert complaint.format(**{key: tmp_path / path for key, path in paths.items()}) in result.err


@pytest.mark.parametrize("name", [".model", "..", "a..b", "users absent", "os.path.no.such", "json.decoder.no", "os/x"])
def test_names_that_are_no_modules(cli, name):
    result = cli("inspect", f"{name}:make")
    assert result.code == 2
    assert f"there is no module {name!r}" in result.err


def test_built_in_names_are_short_for_their_module():
    short = load_workload("mlp", ["blocks=2"])
    full = load_workload("rematplan.workloads:mlp", ["blocks=2"])
    assert [leaf.shape for leaf in short.lift().leaves] == [leaf.shape for leaf in full.lift().leaves]


@pytest.mark.parametrize(
    ("name", "sizes", "complaint"),
    [
        ("gtp", [], r"Did you mean gpt\?"),
        ("users_absent:make", [], "no module 'users_absent'"),
        ("absent.py:make", [], "no file absent.py"),
        ("rematplan.workloads:gtp", [], "did you mean gpt"),
        ("gpt", ["depth=3"], r"unexpected keyword argument 'depth'; it takes .*blocks"),
        ("gpt", ["blocks=0"], "blocks=0 is not a positive whole number"),
        ("gpt", ["blocks=two"], "blocks='two'"),
    ],
)
def test_words_that_name_no_workload(cli, name, sizes, complaint):
    with pytest.raises(InputError, match=complaint):
        load_workload(name, sizes)
    result = cli("measure", name, *sizes, "--target", "cpu")
    assert result.code == 2
    assert result.out == ""


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def make():\n    return 3", "returned a value of type int, not a rematplan.Workload"),
        ("def make():\n    pass", "returned None"),
        ("make = 3", "is a value of type int, not a function"),
        ("def other():\n    pass", "no factory 'make'"),
        ("def make(size):\n    pass", "missing a required argument: 'size'"),
        ("import users_missing", "No module named 'users_missing' .*users_model.py:1"),
        ("def make(:", "invalid syntax"),
        ("import sys\ndef make():\n    sys.exit(3)", r"called sys.exit\(3\)"),
    ],
)
def test_code_that_makes_no_workload(factory_file, source, complaint):
    with pytest.raises(InputError, match=complaint):
        load_workload(f"{factory_file(source)}:make", [])


def test_an_error_inside_the_factory_shows_the_users_own_line(cli, factory_file):
    path = factory_file("""
        import jax.numpy as jnp

        def helper():
            return jnp.ones((2, 3)) @ jnp.ones((2, 3))

        def make():
            return helper()
    """)
    result = cli("measure", f"{path}:make", "--target", "cpu")
    assert result.code == 2
    assert f"{path}:5 in helper: return jnp.ones((2, 3)) @ jnp.ones((2, 3))" in result.err
    assert "Traceback" not in result.err
    assert "Traceback" in cli("measure", f"{path}:make", "--target", "cpu", "--debug").err


@pytest.fixture
def installed(tmp_path, monkeypatch, imports_undone):
    """Writes packages as pip would have installed them."""
    folder = tmp_path / "site-packages"
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    monkeypatch.setattr(userframe, "_INSTALLED", (*userframe._INSTALLED, folder))

    def write(name: str, source: str):
        path = folder / name / "zoo.py"
        path.parent.mkdir(parents=True)
        (path.parent / "__init__.py").touch()
        path.write_text(textwrap.dedent(source))
        return path

    return write


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("raise RuntimeError('broken')", "5 in make: raise RuntimeError('broken')"),
        ("jnp.ones((2, 3)) @ jnp.ones((2, 3))", "5 in make: jnp.ones((2, 3)) @ jnp.ones((2, 3))"),  # JAX raises
        ("json.loads('{')", "5 in make: json.loads('{')"),  # the standard library does
        ("users_layers.zoo.make()", "5 in make: users_layers.zoo.make()"),  # another package does
        ("return rp.Workload(lambda w: w @ w, jnp.ones((2, 3)))", "5 in <lambda>: return rp.Workload("),
    ],
)
def test_an_installed_package_is_the_users_code_too(cli, installed, factory_file, body, line):
    installed("users_layers", "def make():\n    raise RuntimeError('deeper')")
    path = installed(
        "users_zoo",
        f"""
        import json, jax.numpy as jnp, rematplan as rp, users_layers.zoo

        def make():
            {body}
        """,
    )
    result = cli("inspect", "users_zoo.zoo:make")
    assert result.code == 2, result.err
    assert f"{path}:{line}" in result.err
    assert "internal error" not in result.err
    # what the user wrote is more the user's than what the user installed
    script = factory_file("import users_zoo.zoo\ndef make():\n    return users_zoo.zoo.make()")
    shown = cli("inspect", f"{script}:make")
    assert shown.code == 2
    assert "<lambda>" in line or f"{script}:3 in make: return users_zoo.zoo.make()" in shown.err


@pytest.mark.parametrize("library", ["jax", "cyclopts", "json"])
def test_what_a_library_raises_for_rematplan_is_no_users_fault(cli, monkeypatch, library):
    def broken(*_words: object, **_more: object) -> None:
        code = compile("raise RuntimeError('broken')", importlib.import_module(library).__file__, "exec")
        exec(code, {})

    # as if the library were called by rematplan's own code
    broken_here = types.FunctionType(
        broken.__code__.replace(co_filename=workload_words.__file__), globals(), closure=broken.__closure__
    )
    monkeypatch.setattr("rematplan.inspect", broken_here)
    result = cli("inspect", "mlp", "blocks=2")
    assert result.code == 1
    assert "fault of rematplan" in result.err


def test_an_error_inside_the_loss_shows_the_users_own_line(cli, factory_file):
    path = factory_file("""
        import jax, rematplan as rp

        def loss(w, x):
            return (x @ w).sum()

        def make():
            spec = jax.ShapeDtypeStruct((2, 3), "float32")
            return rp.Workload(loss, spec, spec)
    """)
    result = cli("measure", f"{path}:make", "--target", "cpu")
    assert result.code == 2
    assert f"{path}:5 in loss: return (x @ w).sum()" in result.err
