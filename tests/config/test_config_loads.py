"""What a configuration file means once it is loaded, and what serving needs beside it."""

from pathlib import Path

import pytest
import yaml
from config_files import NODE, REFERENCE, load, node, only_node, problems, scheduler

from extproc.config import Backend, BatchStrategy, CachePolicy, HostPort, LogLevel, Protocol, Role
from extproc.hardware import PROFILES, Hardware


class TestWhatLoads:
    def test_every_key_of_the_reference_as_written(self, tmp_path: Path) -> None:
        config = load(tmp_path, REFERENCE)
        assert (config.scheduler.port, config.scheduler.host) == (9000, "0.0.0.0")
        assert (config.scheduler.log_level, config.scheduler.request_timeout_ms) == (LogLevel.INFO, 30_000)
        first, second = config.nodes
        assert (first.id, first.hardware, first.backend) == ("node-a100-01", Hardware.A100_80G, Backend.VLLM)
        assert (first.weight, second.weight) == (0.5, 1.0)
        assert second.profile.memory_bandwidth_gbps == 900
        assert config.kv_cache.policy is CachePolicy.ADAPTIVE
        assert (config.kv_cache.pin_system_prompts, config.kv_cache.eviction_threshold_pct) == (False, 75)
        assert (config.batching.strategy, config.batching.max_batch_size) == (BatchStrategy.STATIC, 16)
        assert config.batching.prefill_decode_split is True
        assert config.models == ("meta-llama/Llama-3-8B-Instruct", "other")

    @pytest.mark.parametrize("empty", ["", "scheduler:\nkv_cache:\nbatching:\n"])
    def test_absent_and_empty_sections_mean_the_defaults(self, tmp_path: Path, empty: str) -> None:
        config = load(tmp_path, empty + NODE)
        assert (config.scheduler.port, config.scheduler.admin_port, config.scheduler.envoy_admin_port) == (
            9000,
            9001,
            9901,
        )
        assert (config.scheduler.max_body_bytes, config.scheduler.max_queue) == (67_108_864, 10_000)
        assert config.scheduler.max_queue_bytes == 1 << 30
        assert config.kv_cache.policy is CachePolicy.PREFIX_AWARE
        assert (config.kv_cache.pin_system_prompts, config.kv_cache.eviction_threshold_pct) == (True, 90)
        assert (config.batching.strategy, config.batching.max_batch_size) == (BatchStrategy.CONTINUOUS, None)
        assert config.batching.prefill_decode_split is False

    @pytest.mark.parametrize("hardware", [kind for kind in Hardware if kind is not Hardware.CUSTOM])
    def test_listed_hardware_has_its_profile(self, tmp_path: Path, hardware: Hardware) -> None:
        assert only_node(tmp_path, f"hardware: {hardware}").profile == PROFILES[hardware]

    def test_gpus_add_up(self, tmp_path: Path) -> None:
        profile = only_node(tmp_path, "hardware: h100-80g", "gpu_count: 4").profile
        assert (profile.vram_gb, profile.memory_bandwidth_gbps) == (320, 13_400)

    def test_custom_hardware_without_tflops_gets_a_fifth_of_its_bandwidth(self, tmp_path: Path) -> None:
        lines = ("hardware: custom", "hardware_profile: {memory_bandwidth_gbps: 900, vram_gb: 48}")
        assert only_node(tmp_path, *lines).profile.compute_tflops == pytest.approx(180)

    def test_paths_start_at_the_folder_of_the_file(self, tmp_path: Path) -> None:
        text = scheduler("extproc_listen: sockets/x.sock") + "    tls: {ca_file: ca.pem}\n"
        config = load(tmp_path, text.replace("http:", "https:"))
        assert config.scheduler.run_dir == tmp_path / ".inferact"
        assert config.scheduler.extproc_address == tmp_path / "sockets/x.sock"
        assert config.nodes[0].tls is not None and config.nodes[0].tls.ca_file == tmp_path / "ca.pem"

    def test_a_tilde_is_the_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/home/somebody")
        listeners = load(tmp_path, scheduler("run_dir: ~/run", "extproc_listen: ~/x.sock")).scheduler
        assert listeners.run_dir == Path("/home/somebody/run")
        assert listeners.extproc_address == Path("/home/somebody/x.sock")

    def test_the_service_listens_in_the_run_dir_unless_told_otherwise(self, tmp_path: Path) -> None:
        config = load(tmp_path, scheduler("run_dir: /run/inferact"))
        assert config.scheduler.extproc_address == Path("/run/inferact/extproc.sock")

    @pytest.mark.parametrize("written", ["127.0.0.1:9002", "localhost:9002", "'[::1]:9002'"])
    def test_loopback_needs_no_tls(self, tmp_path: Path, written: str) -> None:
        address = load(tmp_path, scheduler(f"extproc_listen: {written}")).scheduler.extproc_address
        assert isinstance(address, HostPort) and address.port == 9002

    def test_other_machines_need_tls(self, tmp_path: Path) -> None:
        tls = "extproc_tls: {ca_file: ca.pem, cert_file: c.pem, key_file: k.pem}"
        listen = ("admin_host: 10.0.0.1", "extproc_listen: 10.0.0.1:9002", "xds_listen: 0.0.0.0:9003")
        config = load(tmp_path, scheduler(*listen, tls))
        assert config.scheduler.extproc_address == HostPort("10.0.0.1", 9002)
        assert config.scheduler.xds_listen == HostPort("0.0.0.0", 9003)

    def test_the_same_port_on_two_addresses_is_no_clash(self, tmp_path: Path) -> None:
        config = load(tmp_path, scheduler("host: 10.0.0.1", "admin_host: 127.0.0.1", "admin_port: 9000"))
        assert config.scheduler.admin_port == config.scheduler.port

    @pytest.mark.parametrize(
        ("endpoint", "pieces"),
        [
            ("http://10.0.0.1:8000", ("http", "10.0.0.1", 8000, "")),
            ("http://engine", ("http", "engine", 80, "")),
            ("https://engine.example.org/", ("https", "engine.example.org", 443, "")),
            ("https://gateway/team_a/engine-1/", ("https", "gateway", 443, "/team_a/engine-1")),
            ("http://[fd00::1]:8000/v1/proxy", ("http", "fd00::1", 8000, "/v1/proxy")),
        ],
    )
    def test_an_endpoint_comes_in_pieces(self, tmp_path: Path, endpoint: str, pieces: object) -> None:
        one = only_node(tmp_path, f"endpoint: {endpoint}")
        assert (one.scheme, one.host, one.port, one.base_path) == pieces

    def test_aliases_are_served_and_translated(self, tmp_path: Path) -> None:
        one = only_node(tmp_path, "models: [m, n]", "model_aliases: {gpt-4o: m, 4: n}")
        assert one.serves == {"m", "n", "gpt-4o", "4"}
        assert (one.engine_model("gpt-4o"), one.engine_model("n")) == ("m", "n")

    def test_a_custom_engine_describes_itself(self, tmp_path: Path) -> None:
        engine = "{health_path: /ping, metrics: {running: my:running}, protocol: sglang}"
        one = only_node(tmp_path, "backend: custom", f"engine: {engine}", "role: decode")
        assert one.engine is not None and one.engine.metrics.running == "my:running"
        assert (one.engine.protocol, one.role) == (Protocol.SGLANG, Role.DECODE)

    def test_anchors_and_merge_keys(self, tmp_path: Path) -> None:
        text = NODE.replace("- id: n1", "- &first\n    id: n1") + "  - {<<: *first, id: n2, weight: 0}\n"
        first, second = load(tmp_path, text).nodes
        assert (second.id, second.weight, second.endpoint) == ("n2", 0.0, first.endpoint)

    def test_a_byte_order_mark(self, tmp_path: Path) -> None:
        assert load(tmp_path, "\ufeff" + NODE).models == ("m",)

    def test_roles_that_cover_every_model(self, tmp_path: Path) -> None:
        second = NODE.removeprefix("nodes:\n").replace("n1", "n2") + "    role: both\n"
        text = f"batching: {{prefill_decode_split: true}}\n{node('role: prefill')}{second}"
        assert [one.role for one in load(tmp_path, text).nodes] == [Role.PREFILL, Role.BOTH]

    def test_the_effective_configuration_loads_again_and_says_the_same(self, tmp_path: Path) -> None:
        effective = load(tmp_path, REFERENCE).effective()
        assert effective["scheduler"]["extproc_listen"] == str(tmp_path / ".inferact/extproc.sock")
        (tmp_path / "elsewhere").mkdir()
        again = load(tmp_path / "elsewhere", yaml.safe_dump(effective))
        assert again.effective() == effective

    def test_equal_files_make_equal_configurations(self, tmp_path: Path) -> None:
        one, other = load(tmp_path, REFERENCE), load(tmp_path, REFERENCE)
        assert one.nodes[0].serves and one.nodes[0].host
        assert one == other
        assert one != load(tmp_path, REFERENCE.replace("weight: 0.5", "weight: 0.6"))


class TestServing:
    def test_loading_needs_no_keys_or_files(self, tmp_path: Path) -> None:
        one = only_node(tmp_path, "endpoint: https://x", "api_key_env: KEY", "tls: {ca_file: none.pem}")
        assert one.api_key({"KEY": " abc\n"}) == "abc"

    @pytest.mark.parametrize(
        ("environ", "fault"),
        [
            ({}, "is not set"),
            ({"KEY": " "}, "is empty"),
            ({"KEY": "a\nhunter2"}, "holds characters that no HTTP header can carry"),
            ({"KEY": "é"}, "holds characters that no HTTP header can carry"),
        ],
    )
    def test_a_key_that_cannot_be_used_is_named_by_node_and_variable(
        self, tmp_path: Path, environ: dict[str, str], fault: str
    ) -> None:
        [problem] = problems(tmp_path, node("api_key_env: KEY"), environ=environ)
        assert (problem.line, problem.key) == (7, "nodes[0].api_key_env")
        assert problem.message == f"the variable KEY, for the API key of node `n1`, {fault}"

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        text = node(
            "endpoint: https://x", "tls:", "  ca_file: none.pem", "  cert_file: .", "  key_file: there.pem"
        )
        (tmp_path / "there.pem").touch()
        absent, folder = problems(tmp_path, text, environ={})
        assert (absent.line, absent.key) == (8, "nodes[0].tls.ca_file")
        assert (folder.line, folder.key) == (9, "nodes[0].tls.cert_file")

    @pytest.mark.parametrize("environ", [{}, {"KEY": ""}])
    def test_a_key_is_asked_for_in_vain(self, tmp_path: Path, environ: dict[str, str]) -> None:
        with pytest.raises(KeyError):
            only_node(tmp_path, "api_key_env: KEY").api_key(environ)

    def test_everything_in_place(self, tmp_path: Path) -> None:
        (tmp_path / "ca.pem").touch()
        text = node("endpoint: https://x", "api_key_env: KEY", "tls: {ca_file: ca.pem}")
        assert load(tmp_path, text, environ={"KEY": "abc"}).nodes[0].api_key_env == "KEY"
