"""Every benchmark starts, takes its flags, and in its shortest form ends with results and a page."""

import json

from run_benchmarks import list_benchmarks

SHORT = {
    # as far as one takes a minute, and needs no data of others
}


def test_every_benchmark_says_what_it_takes(trainings, tmp_path):
    trainings.run([str(tmp_path)], 1, module="run_benchmarks")
    answers = json.loads((tmp_path / "help.json").read_text())
    assert list(answers) == list_benchmarks()
    for name, (code, output) in answers.items():
        assert code == 0, output
        assert f"make bench NAME={name}" in output or name == "bench"
        assert "--output" in output
