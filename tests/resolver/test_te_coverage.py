"""The tests of TransformerEngine's cascade reach every line and take every branch of it."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = "cascade cudnn flash inputs query release request rule rules_masks rules_platform rules_shapes"
REPEATED = "recorded_selections or test_every_rule_fires_and_holds_back"
"""What measurement makes ten times slower and no branch needs: thousands of selections like one another."""
FILES = [f"mla_plugin/resolver/transformer_engine/{name}.py" for name in MODULES.split(" ")]


def test_every_branch_of_the_cascade_is_taken(tmp_path: Path) -> None:
    """Measured in a separate process: the cascade is imported there under measurement."""
    data, report = tmp_path / "data", tmp_path / "report.json"
    tests = sorted(str(path) for path in Path(__file__).parent.glob("test_te_*.py") if path != Path(__file__))
    options = ["--rcfile=/dev/null", f"--data-file={data}"]
    measured = ["coverage", "run", *options, "--branch", f"--include={','.join(FILES)}"]
    pytest = ["pytest", "-q", "-p", "no:cacheprovider", "-k", f"not ({REPEATED})", *tests]
    run = subprocess.run(
        [sys.executable, "-m", *measured, "-m", *pytest], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    report_json = [sys.executable, "-m", "coverage", "json", *options, "-q", "-o", str(report)]
    subprocess.run(report_json, cwd=ROOT, check=True)
    files = json.loads(report.read_text())["files"]
    assert sorted(files) == FILES
    missed = {name: (entry["missing_lines"], entry["missing_branches"]) for name, entry in files.items()}
    assert {name: gaps for name, gaps in missed.items() if any(gaps)} == {}
