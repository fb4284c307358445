"""What each mistake in a configuration file is answered with: its line, its key, and advice."""

import os
from pathlib import Path

import pytest
from config_files import NODE, load, marked_line, node, problems, scheduler

from extproc.config import ConfigError, load_config

NODE_MISTAKES = [
    (
        "hardware: a100",
        "hardware",
        "must be one of a100-80g, a100-40g, h100-80g, rtx-4090, a6000, custom; got",
    ),
    ("hardware: a100", "hardware", "got `a100`; did you mean `a100-80g`?"),
    ("backend: VLLM", "backend", "got `VLLM`; did you mean `vllm`?"),
    ("id: a/b", "id", "must be 1 to 64 of the characters"),
    ("id: ..", "id", "not `.` or `..`"),
    (f"id: {'x' * 65}", "id", "must be 1 to 64"),
    ("id: no", "id", "got `false`: put it in quotes"),
    ("id: 7", "id", "got `7`: put it in quotes"),
    ("models: []", "models", "must be a list of at least one model name; got an empty list"),
    ("models: m", "models", "must be a list of at least one model name; got the text `m`"),
    ("models: [a, b, a]", "models[2]", "name it once"),
    ("models: ['']", "models[0]", "must be the name of a model"),
    ("models: [1.5]", "models[0]", "got `1.5`: put it in quotes"),
    (r'models: ["a\tb"]', "models[0]", "cannot be printed"),
    ("weight: 1.5", "weight", "must be a number from 0.0 to 1.0; got `1.5`"),
    ("weight: -0.1", "weight", "must be a number from 0.0 to 1.0"),
    ("weight: .nan", "weight", "must be a number from 0.0 to 1.0"),
    ("weight: heavy", "weight", "got the text `heavy`"),
    ("weight: 50%", "weight", "must be a number from 0.0 to 1.0; got the text `50%`: write 0.5"),
    ("weight: 1/2", "weight", "got the text `1/2`"),
    ("gpu_count: 50%", "gpu_count", "must be a whole number from 1 to 1000000; got the text `50%`"),
    ("admin_key: x", "admin_key", "set INFERACT_ADMIN_KEY"),
    ("weight: true", "weight", "got `true`"),
    ("weight:", "weight", "got nothing"),
    ("gpu_count: 0", "gpu_count", "must be a whole number from 1"),
    ("gpu_count: 1.5", "gpu_count", "must be a whole number from 1"),
    ("role: prefil", "role", "did you mean `prefill`?"),
    ("api_key: x", "api_key", "unknown key; did you mean `api_key_env`?"),
    ("zzz: x", "zzz", "unknown key; known here: id, hardware, "),
    (
        "hardware_profile: {memory_bandwidth_gbps: 1, vram_gb: 1}",
        "hardware_profile",
        "use `hardware: custom`",
    ),
    ("endpoint: 10.0.0.1:8000", "endpoint", "must start with http:// or https://: write http:// in front"),
    ("endpoint: ftp://x", "endpoint", "must start with http:// or https://"),
    ("endpoint: http://", "endpoint", "must name a host"),
    ("endpoint: http://x:0", "endpoint", "must have a port from 1 to 65535"),
    ("endpoint: http://x:70000", "endpoint", "must be a URL"),
    ("endpoint: http://x y", "endpoint", "must be a URL"),
    ("endpoint: http://[::1", "endpoint", "must be a URL"),
    ("endpoint: http://10.0.0.300", "endpoint", "must name a valid IP address"),
    ("endpoint: http://[fe80::1%eth0]:8000", "endpoint", "must not hold a zone (`%...`)"),
    ("endpoint: http://[fe80::1%25eth0]:8000", "endpoint", "must not hold a zone (`%...`)"),
    ("endpoint: http://a!b", "endpoint", "must name a host"),
    ("endpoint: http://x/v1", "endpoint", "the engine's root, without /v1: requests already carry it"),
    ("endpoint: http://x/base/v1/", "endpoint", "the engine's root, without /v1"),
    ("endpoint: http://x/v1/chat/completions", "endpoint", "the engine's root, without /v1"),
    ("endpoint: http://x/a//b", "endpoint", "must have a plain base path"),
    ("endpoint: http://x/a?b=c", "endpoint", "must not hold a query"),
    ("endpoint: 'http://x/#a'", "endpoint", "must not hold a query or a fragment"),
    ("tls: {ca_file: a}", "tls", "https:// endpoint only"),
    ("engine: {health_path: /x}", "engine", "goes with `backend: custom` only"),
    ("kv_events: {endpoint: 'tcp://*:5557'}", "kv_events.endpoint", "must name the engine's host"),
    ("kv_events: {endpoint: 'http://x:1'}", "kv_events.endpoint", "must be tcp://host:port"),
    ("kv_events: {topic: x}", "kv_events.endpoint", "is required: an address tcp://host:port"),
    ("kv_events: {endpoint: 'tcp://x:1', topc: x}", "kv_events.topc", "did you mean `topic`?"),
    ("model_aliases: {a: ''}", "model_aliases.a", "must be the name of a model"),
    ("model_aliases: {a: 5}", "model_aliases.a", "put it in quotes"),
    ("model_aliases: [a]", "model_aliases", "must be a mapping of public names"),
    ("role: !role prefill", "role", "has a YAML tag"),
    ("gpu_count: 0xffffffffffffffffffff", "gpu_count", "is a number far too large"),
    ("gpu_count: 0b_", "gpu_count", "is not the number"),
    ("gpu_count: !!int ''", "gpu_count", "is not the number"),
    ("gpu_count: !!bool x", "gpu_count", "is not the number or boolean"),
]

SCHEDULER_MISTAKES = [
    ("port: 0", "port", "must be a port number from 1 to 65535; got `0`"),
    ("port: 65536", "port", "must be a port number from 1 to 65535; got `65536`"),
    ("port: '9000'", "port", "got the text `9000`"),
    ("port: 9001.0", "port", "must be a port number from 1 to 65535"),
    ("port:", "port", "got nothing"),
    ("admin_port: 9000", "admin_port", "port 9000 is taken by `port`"),
    ("envoy_admin_port: 9001", "envoy_admin_port", "port 9001 is taken by `admin_port`"),
    ("port: 9001", "port", "port 9001 is taken by `admin_port`, by default; each needs"),
    ("admin_port: 9901", "admin_port", "port 9901 is taken by `envoy_admin_port`, by default"),
    ("run_dir: ~nobody-of-that-name/x", "run_dir", "begins with a `~` that names no user"),
    ("extproc_listen: 127.0.0.1:9901", "extproc_listen", "port 9901 is taken by `envoy_admin_port`"),
    ("xds_listen: 127.0.0.1:9000", "xds_listen", "port 9000 is taken by `port`"),
    ("host: example.org", "host", "must be an IP address of this machine, 0.0.0.0 for all, or localhost"),
    ("host: '*'", "host", "must be an IP address of this machine"),
    (
        "log_level: warning",
        "log_level",
        "must be one of debug, info, warn, error; got `warning`; did you mean",
    ),
    ("log_level: off", "log_level", "got `false`"),
    ("request_timeout_ms: 0", "request_timeout_ms", "milliseconds from 1"),
    ("request_timeout_ms: 30s", "request_timeout_ms", "got the text `30s`"),
    ("requst_timeout_ms: 5", "requst_timeout_ms", "unknown key; did you mean `request_timeout_ms`?"),
    ("transport: rest", "transport", "must be one of grpc, lean; got `rest`"),
    (
        f"run_dir: /{'a' * 95}",
        "run_dir",
        "a socket path of 109 bytes, at most 107 are possible; choose a shorter",
    ),
    (f"extproc_listen: /{'é' * 54}", "extproc_listen", "109 bytes, at most 107 are possible"),
    ("extproc_listen: 9002", "extproc_listen", "must be host:port"),
    ("extproc_listen: localhost", "extproc_listen", "must be host:port"),
    ("extproc_listen: 127.0.0.1:0", "extproc_listen", "must have a port from 1 to 65535"),
    ("extproc_listen: example.org:9002", "extproc_listen", "must be an IP address of this machine"),
    ("extproc_listen: 0.0.0.0:9002", "extproc_listen", "must be one address, to which Envoy can connect"),
    ("extproc_listen: '[::]:9002'", "extproc_listen", "must be one address, to which Envoy can connect"),
    ("extproc_listen: '[fe80::1%eth0]:9002'", "extproc_listen", "must not hold a zone (`%...`)"),
    (
        "extproc_listen: 10.0.0.1:9002",
        "extproc_listen",
        "needs another `admin_host`, such as 10.0.0.1: an Envoy that comes to 10.0.0.1 cannot reach",
    ),
    ("max_queue: 0", "max_queue", "must be a whole number from 1"),
    ("max_body_bytes: -1", "max_body_bytes", "must be a whole number of bytes"),
    ("extproc_tls: {ca_file: a, cert_file: b}", "extproc_tls.key_file", "is required: a path"),
    (
        "extproc_tls: {ca_file: 5, cert_file: b, key_file: c}",
        "extproc_tls.ca_file",
        "must be a path; got `5`",
    ),
]

OTHER_MISTAKES = [
    ("kv_cache: {policy: fifo}", "kv_cache.policy", "must be one of lru, prefix-aware, adaptive; got `fifo`"),
    (
        "kv_cache: {eviction_threshold_pct: 101}",
        "kv_cache.eviction_threshold_pct",
        "from 0 to 100; got `101`",
    ),
    ("kv_cache: {eviction_threshold_pct: -1}", "kv_cache.eviction_threshold_pct", "from 0 to 100"),
    ("kv_cache: {eviction_threshold_pct: 9.5}", "kv_cache.eviction_threshold_pct", "from 0 to 100"),
    ("kv_cache: {pin_system_prompts: 1}", "kv_cache.pin_system_prompts", "must be true or false; got `1`"),
    ("kv_cache: [lru]", "kv_cache", "must be a mapping with the keys policy, "),
    ("kv_cache: {polcy: lru}", "kv_cache.polcy", "did you mean `policy`?"),
    ("batching: {strategy: dynamic}", "batching.strategy", "must be one of continuous, static"),
    ("batching: {strategy: static}", "batching.max_batch_size", "is required with `strategy: static`"),
    ("batching: {max_batch_size: 0}", "batching.max_batch_size", "must be a whole number from 1"),
    (
        "batching: {strategy: static, max_batch_size: 2, max_wait_ms: 30000}",
        "batching.max_wait_ms",
        "must be under `scheduler.request_timeout_ms` (30000)",
    ),
    ("batchng: {}", "batchng", "unknown key; did you mean `batching`?"),
    ("zzz: {}", "zzz", "unknown key; known here: scheduler, nodes, kv_cache, batching"),
    (r'"a\tb": 1', r"'a\tb'", "cannot be printed"),
    ("[a]: b", "", "has a list or a mapping as a key"),
    ("<<: 5", "<<", "must be an alias of a mapping"),
]


class TestMistakes:
    """Each is one problem, with the line marked `here`, the key, and advice."""

    @pytest.mark.parametrize(("line", "key", "message"), NODE_MISTAKES)
    def test_in_a_node(self, tmp_path: Path, line: str, key: str, message: str) -> None:
        text = node(f"{line}  # here")
        [problem] = problems(tmp_path, text)
        assert (problem.line, problem.key) == (marked_line(text), f"nodes[0].{key}")
        assert message in problem.message

    @pytest.mark.parametrize(("line", "key", "message"), SCHEDULER_MISTAKES)
    def test_in_the_scheduler(self, tmp_path: Path, line: str, key: str, message: str) -> None:
        text = scheduler("# above", f"{line}  # here")
        [problem] = problems(tmp_path, text)
        assert (problem.line, problem.key) == (marked_line(text), f"scheduler.{key}")
        assert message in problem.message

    @pytest.mark.parametrize(("line", "key", "message"), OTHER_MISTAKES)
    def test_elsewhere(self, tmp_path: Path, line: str, key: str, message: str) -> None:
        text = f"{NODE}{line}  # here\n"
        [problem] = problems(tmp_path, text)
        assert (problem.line, problem.key) == (marked_line(text) if key else 7, key)
        assert message in problem.message

    def test_of_two_written_ports_that_clash_the_later_is_blamed(self, tmp_path: Path) -> None:
        [problem] = problems(tmp_path, scheduler("admin_port: 9100", "port: 9100"))
        assert (problem.line, problem.key) == (2, "scheduler.admin_port")
        assert problem.message == "port 9100 is taken by `port`; each needs a port of its own"

    def test_a_problem_reads_as_file_line_key_and_advice(self, tmp_path: Path) -> None:
        [problem] = problems(tmp_path, node("weight: 2"))
        advice = "must be a number from 0.0 to 1.0; got `2`"
        assert str(problem) == f"{tmp_path / 'inferact.yaml'}:7: nodes[0].weight: {advice}"

    @pytest.mark.parametrize("key", ["id", "hardware", "backend", "endpoint", "models"])
    def test_a_required_key_is_missed_where_its_node_begins(self, tmp_path: Path, key: str) -> None:
        lines = [line for line in node("weight: 1").splitlines() if f" {key}:" not in line]
        lines[1] = "  - " + lines[1].strip().removeprefix("- ")
        [problem] = problems(tmp_path, "\n".join(lines))
        assert (problem.line, problem.key) == (2, f"nodes[0].{key}")
        assert problem.message.startswith("is required: ")

    def test_custom_hardware_needs_a_profile(self, tmp_path: Path) -> None:
        [problem] = problems(tmp_path, node("hardware: custom"))
        assert (problem.line, problem.key) == (2, "nodes[0].hardware_profile")

    @pytest.mark.parametrize("nodes", ["", "nodes: []\n"])
    def test_no_nodes(self, tmp_path: Path, nodes: str) -> None:
        [problem] = problems(tmp_path, f"scheduler: {{}}\n{nodes}")
        assert problem.key == "nodes" and "a list of at least one node" in problem.message

    def test_a_key_given_twice_names_both_lines(self, tmp_path: Path) -> None:
        [problem] = problems(tmp_path, NODE + "    weight: 1\n    weight: 0.5\n")
        assert (problem.line, problem.key) == (8, "nodes[0].weight")
        assert problem.message == "appears twice, first on line 7; keep one"

    @pytest.mark.parametrize("other_mistake", ["", "    weight: 2\n"])
    def test_two_nodes_with_one_id(self, tmp_path: Path, other_mistake: str) -> None:
        text = NODE + other_mistake + NODE.removeprefix("nodes:\n").replace("n1", "n1 # here")
        problem = problems(tmp_path, text)[-1]
        assert (problem.line, problem.key) == (marked_line(text), "nodes[1].id")
        assert problem.message == "is the id of nodes[0] already; ids must be unique"

    @pytest.mark.parametrize(("role", "lacking"), [("prefill", "decode"), ("decode", "prefill")])
    def test_a_split_that_leaves_a_model_with_half_its_nodes(
        self, tmp_path: Path, role: str, lacking: str
    ) -> None:
        text = f"{node(f'role: {role}')}batching:\n  prefill_decode_split: true\n"
        [problem] = problems(tmp_path, text)
        assert (problem.line, problem.key) == (9, "batching.prefill_decode_split")
        assert f"`m` has no node with role {lacking} or both" in problem.message

    @pytest.mark.parametrize(
        ("backend", "way"), [("tgi", "a vllm or sglang node"), ("custom", "engine.protocol")]
    )
    def test_half_a_role_for_an_engine_without_a_protocol(
        self, tmp_path: Path, backend: str, way: str
    ) -> None:
        [problem] = problems(tmp_path, node(f"backend: {backend}", "role: prefill"))
        assert (problem.line, problem.key) == (7, "nodes[0].role") and way in problem.message

    @pytest.mark.parametrize("lone", ["cert_file", "key_file"])
    def test_half_a_certificate(self, tmp_path: Path, lone: str) -> None:
        [problem] = problems(tmp_path, node("endpoint: https://x", f"tls: {{{lone}: a.pem}}"))
        assert problem.key == "nodes[0].tls.key_file" and problem.line == 7

    @pytest.mark.parametrize("host", ["127.0.0.1", "'::1'", "0.0.0.0", "'::'"])
    def test_an_admin_app_that_an_envoy_elsewhere_cannot_reach(self, tmp_path: Path, host: str) -> None:
        tls = "extproc_tls: {ca_file: a, cert_file: b, key_file: c}"
        text = scheduler(f"admin_host: {host}", "extproc_listen: 10.0.0.1:9002", tls)
        [problem] = problems(tmp_path, text)
        assert (problem.line, problem.key) == (3, "scheduler.extproc_listen")

    @pytest.mark.parametrize("key", ["extproc_listen", "xds_listen"])
    def test_a_listener_for_other_machines_without_tls(self, tmp_path: Path, key: str) -> None:
        [problem] = problems(tmp_path, scheduler(f"{key}: 10.0.0.1:9002", "admin_host: 10.0.0.1"))
        assert (problem.line, problem.key) == (1, "scheduler.extproc_tls")
        assert f"other machines can reach `{key}`" in problem.message

    def test_every_mistake_is_told_at_once_in_the_order_of_the_file(self, tmp_path: Path) -> None:
        text = scheduler("port: 0", "hots: x") + "    weight: 2\nkv_cache: {policy: x}\nbatching: 5\nzzz: 1\n"
        keys = ["scheduler.port", "scheduler.hots", "nodes[0].weight", "kv_cache.policy", "batching", "zzz"]
        assert [problem.key for problem in problems(tmp_path, text)] == keys

    @pytest.mark.parametrize(
        "line",
        [
            "endpoint: http://user:hunter2secret@x:8000",
            "endpoint: [http://user:hunter2secret@x:8000]",
            "endpoint: http://user:hunter2secret@[::1",
            "api_key_env: sk-hunter2secret",
            "api_key_env: hf_hunter2secret",
            "backend: http://user:hunter2secret@x",
            "hardware: sk-live-hunter2secret-0123456789abcdefghij",
            "api_key: hunter2secret",
            "role: *hunter2secret",
        ],
    )
    def test_what_may_be_a_secret_is_never_shown(self, tmp_path: Path, line: str) -> None:
        with pytest.raises(ConfigError) as caught:
            load(tmp_path, node(line))
        assert "hunter2secret" not in str(caught.value)


class TestFilesThatCannotBeUsed:
    @pytest.mark.parametrize(
        ("content", "line", "message"),
        [
            (b"", None, "is empty"),
            (b"# nothing\n", None, "is empty"),
            (b"- a\n", 1, "must be a mapping"),
            (b"\n\ntext", 3, "must be a mapping"),
            (b"a: 1\nb: \xff\n", 2, "is not UTF-8 text"),
            ("a: 1".encode("utf-16"), 1, "is not UTF-8 text"),
            (b"a: 1\nb: \x07", 2, "control character"),
            (b"a:\n\tb: 1", 2, "a tab; indent with spaces"),
            (b"a: 1\nb: c: d", 2, "put text that holds `: ` in quotes"),
            (b"a: 1\nb: @x", 2, "must be in quotes"),
            (b"a:\n  - b\n c: 1", 3, "the indentation does not match"),
            (b"a: [1,\n", 2, "the file ends inside"),
            (b"a: 'x\n", 2, "a quote that is not closed"),
            (b"a: *x\n", 1, "an alias"),
            (b"a: &x 1\nb: &x 2", 2, "an anchor (`&name`) that is defined twice"),
            (b"a: 1\n---\na: 2\n", 2, "a second document"),
            (b'a: "\\UFFFFFFFF"', None, "an escape that names no character"),
            (b"[" * 5000, None, "is nested too deeply"),
            (b"a: &a [*a]", None, "an alias that contains itself"),
            (b"a: &a {<<: *a}", None, "an alias that contains itself"),
            (b"#" * ((1 << 20) + 1), None, "is too large"),
        ],
    )
    def test_content(self, tmp_path: Path, content: bytes, line: int | None, message: str) -> None:
        path = tmp_path / "inferact.yaml"
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            load_config(path)
        [problem] = caught.value.problems
        assert (problem.file, problem.line) == (str(path), line)
        assert message in problem.message

    @pytest.mark.parametrize("bomb", ["[*{0}, *{0}, *{0}, *{0}]", "{{<<: [*{0}, *{0}, *{0}, *{0}]}}"])
    def test_an_alias_bomb(self, tmp_path: Path, bomb: str) -> None:
        lines = ["a0: &a0 {k: v}"] + [f"a{i}: &a{i} {bomb.format(f'a{i - 1}')}" for i in range(1, 40)]
        [problem] = problems(tmp_path, "\n".join(lines))
        assert "use fewer aliases" in problem.message

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("missing.yaml", "no such file"),
            (".", "Is a directory"),
            ("a\0b", "not possible"),
            ("x" * 300, "too long"),
        ],
    )
    def test_path(self, tmp_path: Path, name: str, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / name)

    @pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
    def test_without_permission(self, tmp_path: Path) -> None:
        path = tmp_path / "inferact.yaml"
        path.touch(mode=0)
        with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            load_config(path)
