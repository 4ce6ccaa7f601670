"""The documentation: MyST pages, run while they are built.

`make docs` writes it to `site/`. A page with a `kernelspec` in its header is run cell by cell with the Python that runs
Sphinx and the rematplan of this checkout; a cell that fails, writes to standard error or takes too long fails the build.
Nothing is read from the network, neither by the build nor by a reader's browser.
"""

from __future__ import annotations

import atexit
import copy
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from myst_nb.core import render
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

# ----------------------------------------------------------------------------------- where cells run: inherited by kernels

# Also where kernels look for a profile: not that of the one who builds.
_scratch = Path(tempfile.mkdtemp(prefix="rematplan-docs-"))
atexit.register(shutil.rmtree, _scratch, ignore_errors=True)
_startup = _scratch / "profile_default" / "startup"
_startup.mkdir(parents=True)
(_startup / "shell.py").write_text('''
import os

from IPython.core.magic import register_cell_magic

# ipykernel tells what a cell starts that it writes to a terminal.
for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "CLICOLOR"):
    os.environ.pop(name, None)
os.environ["TERM"] = "dumb"


@register_cell_magic
def bash(line, cell):
    """As IPython's own, but any command that fails is an error, not the last one alone."""
    import subprocess
    import sys

    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", cell], capture_output=True, text=True)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    done.check_returncode()


del os, name, register_cell_magic, bash
''')
os.environ.update(
    IPYTHONDIR=str(_scratch),
    JAX_PLATFORMS="cpu",  # the compilers for chips are here, chips are not: JAX need not look for them
    JUPYTER_PREFER_ENV_PATH="1",  # the kernel of this environment, not one of the user's
    PYDEVD_DISABLE_FILE_VALIDATION="1",  # ipykernel's debugger has nothing to say here
    PYTHONPATH=os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH")))),
    PATH=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),  # `rematplan` in shell cells
    COLUMNS="104",  # what fits on a page; the command line writes 120 into a pipe
    NO_COLOR="1",
    # The folder of a notebook's cells has the number of its process: without it, what was compiled once is found again.
    JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX=".*/",
)

nb_execution_mode = "force"
nb_execution_in_temp = True  # what a page writes is gone after it
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 600  # seconds for one cell: several full compiles for a TPU
nb_output_stderr = "remove-warn"  # warnings of JAX and of ours are errors here
nb_merge_streams = True  # by `joined`, below

# --------------------------------------------------------------------------------------------------------------- pages

project = "rematplan"
author = "the rematplan authors"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["config.cache"]
pygments_style = "friendly"
highlight_language = "none"  # a fence without a language is output or text

html_theme = "sphinx_book_theme"
html_title = "rematplan"
html_static_path = ["_static"]
html_css_files = ["rematplan.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_last_updated_fmt = None
html_math_renderer = "mathml"
html_theme_options = {
    "home_page_in_toc": True,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}

# ------------------------------------------------------------------------------------------------------------------ API

default_role = "code"  # docstrings write code in single backticks, as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
# Lists instead of fields: one line of ours may explain several names ("args, kwargs: ...").
napoleon_use_param = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]

nitpicky = True
# Types of other packages, whose documentation is not linked: that would take the network.
nitpick_ignore_regex = [
    (
        r"py:.*",
        r"(Any|Callable|Generator|Sequence|Mapping|Path|PathLike|os|pathlib|typing|collections|concurrent|jax|flax|optax|numpy)\b.*",
    ),
    # what the public surface mentions and these pages do not describe
    (
        r"py:.*",
        r"(rematplan\.(program\.graph|lift|step|_remat\.F|target\.executors)\b.*|Progress|Dispatcher|ExecutorLike)",
    ),
    (r"py:.*", r"(dict|tuple)\[.*"),  # autodoc cuts a type in two where it has a default factory
]

# ------------------------------------------------------------------------------------------- what Sphinx has no setting for

FENCE = re.compile(r"^```python (setup|fires|silent)(?: (classic|remat3))?$", re.MULTILINE)
CAPTIONS = {"setup": "", "fires": "It appears in", "silent": "It does not appear in"}
REMAT = {"": "", "classic": " (not with JAX_REMAT3=1)", "remat3": " (with JAX_REMAT3=1)"}


def captioned(app: Sphinx, page: str, source: list[str]) -> None:
    """The programs of `findings.md` say in their fences what the tests expect of them; a reader sees a caption."""

    def directive(fence: re.Match[str]) -> str:
        caption = CAPTIONS[fence[1]] + REMAT[fence[2] or ""]
        return "```{code-block} python" + (f"\n:caption: {caption}\n" if caption else "")

    source[0] = FENCE.sub(directive, source[0])


def joined(outputs: list[Any]) -> list[Any]:
    """What a cell prints comes in pieces; myst-nb (1.4.0) would begin a line with each."""
    kept: list[Any] = []
    for output in outputs:
        last = kept[-1] if kept else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"] += output["text"]
        else:
            kept.append(copy.copy(output))  # called once for each format
    return kept


render.coalesce_streams = joined


def math(translator: Any, node: nodes.math) -> None:
    """Formulas as MathML, which browsers show by themselves."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def math_block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def executed_aside(app: Sphinx) -> None:
    """myst-nb (1.4.0) writes notebooks beside the output folder, which is the repository, and has no setting for that."""
    app.env.mystnb_config = app.env.mystnb_config.copy(output_folder=str(_scratch / "executed"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", executed_aside, priority=900)  # after myst-nb
    app.connect("source-read", captioned)
    app.add_html_math_renderer("mathml", (math, None), (math_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
