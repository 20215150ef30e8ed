"""Every flag and variable of horovodrun 0.28.1: the same, mapped, or without effect and why."""

import inspect
import re

import pytest
from click.testing import CliRunner

from choros.errors import ConfigError
from choros.launch import cli
from choros.launch.options import OF_HOROVODRUN
from choros.launch.plan.environment import horovod_variables
from choros.launch.plan.flags import LEVEL, SHARE, SWITCH
from choros.launch.plan.horovod_flags import (
    HOROVOD_FLAGS,
    check,
    parse_config,
    read_config_file,
    unused,
    variables,
    with_config,
)
from choros.launch.run import run
from choros.settings import HOROVOD_UNUSED, VARIABLES, Config
from choros.topology import Topology
from launch.flag_pages import CHOROSRUNS, pages

SPELLINGS = [
    (flag, name) for flag in OF_HOROVODRUN for name in (*flag.on, *flag.off) if name not in flag.own_names.split()
]
#: The configuration file of Horovod's own tests, with all sections.
CONFIG = {
    "controller": "gloo",
    "params": {
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 10,
        "cache_capacity": 2048,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": True,
    },
    "autotune": {
        "enabled": True,
        "log_file": "horovod_autotune_log.txt",
        "warmup_samples": 5,
        "steps_per_sample": 20,
        "bayes_opt_max_samples": 50,
        "gaussian_process_noise": 0.9,
    },
    "timeline": {"filename": "horovod_timeline.json", "mark_cycles": True},
    "stall_check": {"enabled": True, "warning_time_seconds": 120, "shutdown_time_seconds": 240},
    "library_options": {"mpi_threads_disable": True, "num_nccl_streams": 2, "mlsl_bgt_affinity": 1},
    "logging": {"level": "debug", "with_timestamp": False},
}


def given(*argv):
    """What chorosrun's command line sets."""
    return cli.chorosrun.make_context("chorosrun", [*argv, "true"]).params


def sample(flag):
    """What follows a flag."""
    if flag.value is SWITCH:
        return []
    if flag.value is LEVEL:
        return ["INFO"]
    if flag.nargs == 2:
        return ["60", "300"]
    return ["0.8" if flag.value is SHARE else "2" if flag.value.is_number else "text"]


def error_of(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        cli.main([*argv, "true"])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_table_has_all_flags_once():
    assert sum(1 + bool(flag.off) for flag in OF_HOROVODRUN) == 60  # two spellings of --network-interfaces are one row
    assert len({name for _, name in SPELLINGS}) == len(SPELLINGS) == 72  # with --stall-shutdown


@pytest.mark.parametrize(("flag", "name"), [pytest.param(*each, id=each[1]) for each in SPELLINGS])
def test_every_flag_of_horovodrun_is_accepted(flag, name):
    params = given(name, *sample(flag))
    assert params["command"] == ("true",)
    if flag.no_effect:
        assert unused(params) == [f"{flag.spelled(params[flag.dest])} has no effect: {flag.no_effect}"]
    else:
        assert not unused(params)
    if flag in HOROVOD_FLAGS and flag.variable is not None:
        assert set(variables(params)) <= {flag.variable.name}
        Config.from_environ(variables(params))


def test_reasons_are_sentences():
    for flag in HOROVOD_FLAGS:
        if flag.no_effect:
            assert flag.no_effect.endswith("."), flag
            assert len(flag.no_effect) > 30, flag


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["--fusion-threshold-mb", "64"], {"CHOROS_FUSION_BYTES": str(64 << 20)}),
        (["--fusion-threshold-mb=0"], {"CHOROS_FUSION_BYTES": "0"}),
        (["--autotune", "--autotune-log-file", "a.csv"], {"CHOROS_AUTOTUNE": "1", "CHOROS_AUTOTUNE_LOG": "a.csv"}),
        (["--no-autotune"], {"CHOROS_AUTOTUNE": "0"}),
        (
            ["--timeline-filename", "t.json", "--timeline-mark-cycles"],
            {"CHOROS_TIMELINE": "t.json", "CHOROS_TIMELINE_MARK_CYCLES": "1"},
        ),
        (["--no-timeline-mark-cycles"], {"CHOROS_TIMELINE_MARK_CYCLES": "0"}),
        (["--stall-check-warning-time-seconds", "5"], {"CHOROS_STALL_SECONDS": "5"}),
        (["--stall-check-warning-time-seconds", "5", "--stall-check"], {"CHOROS_STALL_SECONDS": "5"}),
        (["--stall-check-warning-time-seconds", "5", "--no-stall-check"], {"CHOROS_STALL_SECONDS": "0"}),
        (["--stall-check-shutdown-time-seconds", "9"], {"CHOROS_STALL_SHUTDOWN_SECONDS": "9"}),
        (["--log-level", "trace"], {"CHOROS_LOG_LEVEL": "DEBUG"}),
        (["--log-level", "FATAL"], {"CHOROS_LOG_LEVEL": "ERROR"}),
        (["--log-with-timestamp"], {"CHOROS_LOG_TIME": "1"}),
        (["--log-without-timestamp"], {"CHOROS_LOG_TIME": "0"}),
        (["--log-hide-timestamp"], {"CHOROS_LOG_TIME": "0"}),
        (["--no-log-hide-timestamp"], {"CHOROS_LOG_TIME": "1"}),
        (["--gloo"], {"CHOROS_ENGINE": "torch"}),
        (["--mpi"], {"CHOROS_ENGINE": "mpi"}),
    ],
)
def test_flags_set_variables(argv, expected):
    assert variables(given(*argv)) == expected


def test_a_variable_that_is_given_overrides_a_flag():
    params = given("--autotune", "--env", "CHOROS_AUTOTUNE=0", "--env", "MINE=1", "--log-level", "debug")
    arguments = cli.arguments_of(params)
    assert arguments.env == {"CHOROS_AUTOTUNE": "0", "CHOROS_LOG_LEVEL": "DEBUG", "MINE": "1"}
    assert arguments.verbose


def test_flags_without_effect_share_a_sentence():
    lines = unused(given("--torus-allreduce", "--no-hierarchical-allreduce", "--hierarchical-allgather", "--jsrun"))
    listed = "--no-hierarchical-allreduce, --hierarchical-allgather and --torus-allreduce have no effect: "
    assert [line.startswith(start) for line, start in zip(lines, (listed, "--jsrun has no effect: "), strict=True)]


def test_flags_after_the_command_are_the_commands():
    params = cli.chorosrun.make_context("chorosrun", ["-np", "2", "python", "--gloo", "--min-np", "2"]).params
    assert params["command"] == ("python", "--gloo", "--min-np", "2")
    assert params["use_gloo"] is None


@pytest.mark.parametrize("argv", [["-np", "2"], ["-np2"], ["-np=2"], ["-n", "2"], ["-n2"], ["--num-proc", "2"]])
def test_spellings_of_the_number_of_ranks(argv):
    assert given(*argv)["num_proc"] == 2


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--num-p", "2"], {"num_proc": 2}),
        (["--num-p=2", "--verb"], {"num_proc": 2, "verbose": True}),
        (["--timeline-f", "t.json", "--timeline-m"], {"timeline_filename": "t.json", "timeline_mark_cycles": True}),
        (["--no-stall"], {"stall_check": False}),
        (["--log-l", "debug"], {"log_level": "DEBUG"}),
        (["--hostf", "hosts"], {"hostfile": "hosts"}),
        (["--hosts", "a:2"], {"hosts": "a:2"}),  # also the beginning of nothing else
        (["--autotune"], {"autotune": True, "autotune_log_file": None}),  # a flag, and the beginning of others
        (["-np2", "-p", "22"], {"num_proc": 2, "ssh_port": 22}),
        (["--ps", "1"], {"ps": 1}),  # chorosrun's own
    ],
)
def test_horovodrun_takes_the_beginning_of_a_flag(argv, expected):
    params = cli.chorosrun.make_context("horovodrun", [*argv, "true"], token_normalize_func=cli.unabbreviated).params
    assert {name: params[name] for name in expected} == expected


@pytest.mark.parametrize("abbreviation", ["--host", "--no", "--log", "--nothing"])
def test_the_beginning_of_several_flags_or_of_none_is_an_error(abbreviation, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([abbreviation, "true"], abbreviations=True)
    assert ended.value.code == 2
    assert re.search(rf"No such option:? '?{abbreviation}\b", capsys.readouterr().err)  # click 8.1 has no quotes


def test_chorosrun_takes_whole_flags_only(capsys):
    assert re.search(r"No such option:? '?--num-p\b", error_of(capsys, "--num-p", "2"))


@pytest.mark.parametrize(
    ("environ", "controller"),
    [
        ({}, None),
        ({"CHOROS_ENGINE": "MPI"}, "mpi"),
        ({"HOROVOD_CONTROLLER": "gloo"}, "gloo"),
        ({"CHOROS_ENGINE": "?"}, None),
    ],
)
def test_ranks_are_told_a_controller_that_was_requested(environ, controller):
    found = horovod_variables(Topology(), "host", environ)
    assert found.get("HOROVOD_CONTROLLER") == found.get("HOROVOD_CPU_OPERATIONS") == controller


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-npx"], "'x' is not a valid whole number"),
        (["--ssh-port", "p2"], "'p2' is not a valid whole number"),
        (["--cycle-time-ms", "-1"], "--cycle-time-ms -1.0: expected a number, 0 or more."),
        (["--cycle-time-ms", "soon"], "'soon' is not a valid float"),
        (["--autotune-gaussian-process-noise", "2"], "expected a number from 0 to 1"),
        (["--fusion-threshold-mb", "-3"], "--fusion-threshold-mb -3: expected a whole number, 0 or more."),
        (["--log-level", "loud"], "'loud' is not one of"),
        (["--gloo", "--mpi"], "Gloo and MPI are two engines: give only one of them."),
        (["--config-file", "nowhere.yaml"], "--config-file nowhere.yaml: it cannot be read: No such file"),
    ],
)
def test_invalid_values(argv, message, capsys):
    assert message in error_of(capsys, *argv)


def test_gloo_needs_torch():
    check({"use_gloo": True}, lambda: True)
    with pytest.raises(ConfigError, match=r"^--gloo: Gloo comes with PyTorch, which is not installed: pip install"):
        check({"use_gloo": True}, lambda: False)


def test_a_configuration_file_of_horovod():
    values = parse_config(CONFIG)
    assert {**values, "use_gloo": None, "stall_check": None} == {
        "use_gloo": None,
        "fusion_threshold_mb": 32,
        "cycle_time_ms": 10,
        "cache_capacity": 2048,
        "hierarchical_allreduce": True,
        "hierarchical_allgather": True,
        "autotune": True,
        "autotune_log_file": "horovod_autotune_log.txt",
        "autotune_warmup_samples": 5,
        "autotune_steps_per_sample": 20,
        "autotune_bayes_opt_max_samples": 50,
        "autotune_gaussian_process_noise": 0.9,
        "timeline_filename": "horovod_timeline.json",
        "timeline_mark_cycles": True,
        "stall_check": None,
        "stall_check_warning_time_seconds": 120,
        "stall_check_shutdown_time_seconds": 240,
        "mpi_threads_disable": True,
        "num_nccl_streams": 2,
        "thread_affinity": 1,
        "log_level": "debug",
        "log_with_timestamp": False,
    }
    assert variables(values) == {
        "CHOROS_FUSION_BYTES": str(32 << 20),
        "CHOROS_AUTOTUNE": "1",
        "CHOROS_AUTOTUNE_LOG": "horovod_autotune_log.txt",
        "CHOROS_TIMELINE": "horovod_timeline.json",
        "CHOROS_TIMELINE_MARK_CYCLES": "1",
        "CHOROS_STALL_SECONDS": "120",
        "CHOROS_STALL_SHUTDOWN_SECONDS": "240",
        "CHOROS_LOG_LEVEL": "DEBUG",
        "CHOROS_LOG_TIME": "0",
        "CHOROS_ENGINE": "torch",
    }


def test_the_command_line_overrides_the_file():
    merged = with_config(given("--no-autotune", "--mpi", "-np", "2"), parse_config(CONFIG))
    assert (merged["autotune"], merged["use_mpi"], merged["use_gloo"]) == (False, True, None)
    assert (merged["timeline_filename"], merged["num_proc"]) == ("horovod_timeline.json", 2)


@pytest.mark.parametrize("text", ["", "params:\n", "timeline:\n  filename:\n"])
def test_an_empty_file_sets_nothing(text, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    assert read_config_file(file) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("param:\n  cycle_time_ms: 1\n", "there is no section param. Did you mean params? It has controller, params, "),
        ("params:\n  cycle_time: 1\n", "there is no key params.cycle_time. Did you mean params.cycle_time_ms? It has "),
        ("timeline:\n  file: x\n", "there is no key timeline.file."),
        ("params:\n  cycle_time_ms: fast\n", "params.cycle_time_ms: 'fast' is not a number, 0 or more."),
        ("params:\n  cache_capacity: 1.5\n", "params.cache_capacity: 1.5 is not a whole number, 0 or more."),
        ("params:\n  cache_capacity: true\n", "params.cache_capacity: True is not a whole number"),
        ("autotune:\n  enabled: 1\n", "autotune.enabled: 1 is not true or false."),
        ("autotune:\n  gaussian_process_noise: 2\n", "2 is not a number from 0 to 1."),
        ("logging:\n  level: loud\n", "logging.level: 'loud' is not one of TRACE, DEBUG"),
        ("timeline:\n  filename: 3\n", "timeline.filename: 3 is not a text."),
        ("controller: ray\n", "controller: 'ray' is not one of gloo, mpi."),
        ("params: 3\n", "section params is 3; expected keys and values"),
        ("- params\n", "the file is ['params']; expected keys and values"),
        ("params: {\n", "it is not a YAML file: "),
        ("!!python/object/apply:os.getcwd []\n", "it is not a YAML file: could not determine a constructor"),
    ],
)
def test_a_file_with_an_error(text, message, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        read_config_file(file)
    assert str(raised.value).startswith(f"--config-file {file}: ")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOROVOD_FUSION_THRESHOLD": "1048576"}, {"fusion_bytes": 1 << 20}),
        ({"HOROVOD_FUSION_THRESHOLD": "1048576", "CHOROS_FUSION_BYTES": "4096"}, {"fusion_bytes": 4096}),
        ({"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "f"}, {"autotune": True, "autotune_log": "f"}),
        ({"HOROVOD_LOG_LEVEL": "fatal", "HOROVOD_LOG_HIDE_TIME": "0"}, {"log_level": "ERROR", "log_time": True}),
        ({"HOROVOD_LOG_HIDE_TIME": "1"}, {"log_time": False}),
        ({"HOROVOD_TIMELINE": "t", "HOROVOD_TIMELINE_MARK_CYCLES": "1"}, {"timeline": "t", "mark_cycles": True}),
        ({"HOROVOD_TIMELINE": "DYNAMIC"}, {"timeline": None}),
        ({"HOROVOD_START_TIMEOUT": "7"}, {"start_timeout": 7.0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}, {"stall_seconds": 7.0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7", "HOROVOD_STALL_CHECK_DISABLE": "1"}, {"stall_seconds": 0.0}),
        ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "7", "HOROVOD_STALL_CHECK_DISABLE": "0"}, {"stall_seconds": 7.0}),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "9"}, {"stall_shutdown_seconds": 9.0}),
        ({"HOROVOD_CONTROLLER": "gloo"}, {"engine": "torch"}),
        ({"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "MPI"}, {"engine": "mpi"}),
        ({"HOROVOD_CPU_OPERATIONS": "ccl"}, {"engine": "auto"}),
        ({"HOROVOD_LOG_LEVEL": "", "HOROVOD_CYCLE_TIME": "x"}, {"log_level": "WARNING"}),
    ],
)
def test_variables_of_horovod_are_read(environ, expected):
    config = Config.from_environ(environ)
    assert {name: getattr(config, name) for name in expected} == expected


def test_an_invalid_variable_of_horovod_is_named():
    with pytest.raises(ConfigError, match=r"^HOROVOD_CONTROLLER='ray' is not one of mpi, gloo, auto"):
        Config.from_environ({"HOROVOD_CONTROLLER": "ray"})
    with pytest.raises(ConfigError, match=r"^HOROVOD_STALL_CHECK_TIME_SECONDS='x' is not a number of seconds"):
        Config.from_environ({"HOROVOD_STALL_CHECK_TIME_SECONDS": "x"})


def test_every_variable_of_a_flag_is_read_or_has_a_reason():
    known = {alias for variable in VARIABLES.values() for alias in variable.aliases}
    assert not known & HOROVOD_UNUSED.keys()
    named = {f"HOROVOD_{flag.dest.upper()}" for flag in HOROVOD_FLAGS if flag.no_effect}
    assert {"HOROVOD_CYCLE_TIME_MS", "HOROVOD_DISABLE_CACHE", "HOROVOD_USE_JSRUN"} == named - HOROVOD_UNUSED.keys()


def test_the_signature_of_horovod_run():
    """The arguments of ``horovod.run`` of Horovod 0.28.1: names, order and defaults."""
    nothing = [
        *("min_num_proc", "max_num_proc", "slots", "reset_limit", "cooldown_range", "hosts", "hostfile"),
        *("host_discovery_script", "start_timeout", "ssh_port", "ssh_identity_file", "disable_cache"),
        *("output_filename", "verbose", "use_gloo", "use_mpi", "mpi_args", "network_interface"),
        *("network_interfaces", "executable", "np", "min_np", "max_np"),
    ]
    first = {"func": inspect.Parameter.empty, "args": (), "kwargs": None, "num_proc": 1}
    expected = {**first, **dict.fromkeys(nothing)}
    parameters = inspect.signature(run).parameters.values()
    positional = [each for each in parameters if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert [(each.name, each.default) for each in positional] == list(expected.items())


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"min_num_proc": 2}, "--min-np 2: the job starts with fewer ranks, -np 1."),
        ({"slots": 2}, "slots applies only to hosts of host_discovery_script."),
        ({"reset_limit": 1}, "reset_limit applies only to elastic jobs: add min_num_proc or max_num_proc"),
        ({"min_num_proc": 1, "cooldown_range": (2, 1)}, "cooldown_range=(2, 1): expected two numbers, the smaller"),
    ],
)
def test_run_checks_elastic_arguments(argument, message):
    with pytest.raises(ConfigError, match=rf"^{re.escape(message)}"):
        run(print, **argument)


@pytest.mark.parametrize(
    ("argument", "new"), [({"np": 0}, "num_proc"), ({"network_interface": "a", "hosts": ""}, "network_interfaces")]
)
def test_deprecated_arguments_of_run(argument, new):
    with pytest.warns(DeprecationWarning, match=f"is deprecated, use {new} instead"), pytest.raises(ConfigError):
        run(print, **argument)


def test_help():
    text = CliRunner().invoke(cli.chorosrun, ["--help"]).output
    for heading in (
        "Examples:",
        "Hosts:",
        "Output:",
        "Time:",
        "MPI:",
        "Tuning:",
        "Horovod:",
        "Signals:",
        "Exit codes:",
    ):
        assert heading in text
    assert text.index("Examples:") < text.index("Hosts:") < text.index("Exit codes:")
    for option in cli.chorosrun.params:
        assert getattr(option, "hidden", False) or option.opts[0] in text or option.name == "command"
    for flag in HOROVOD_FLAGS:
        if flag.no_effect:
            assert not re.search(rf"^ +{re.escape(flag.on[0])}\b", text, re.MULTILINE)


def test_flags_that_are_the_same_are_chorosruns():
    known = {name for option in cli.chorosrun.params for name in (*option.opts, *option.secondary_opts)}
    assert {name for _, name in SPELLINGS} <= known


def test_the_pages_list_all():
    """``python tests/launch/flag_pages.py`` writes them."""
    assert {path: path.read_text() for path in pages()} == pages()


def test_chorosruns_page_lists_all_variables():
    text = CHOROSRUNS.read_text()
    assert not [variable.name for variable in VARIABLES.values() if f"`{variable.name}`" not in text]
