"""Tests with a real etcd: whole seconds, prefixes, watches, lost data, users, TLS, restarts."""

import base64
import pathlib
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from telegrad._core.stores.directory import DirectoryLost, DirectoryRefused, DirectoryReset, Event
from telegrad.directories import etcd
from telegrad.directories.etcd import EtcdDirectory
from tests.cluster import in_background, takes_less_than, wait_until
from tests.directory.conftest import Connect
from tests.directory.etcd_servers import Cluster, needs_etcd
from tests.directory.harness import LONG, PATIENCE, SOON, written
from tests.transport.test_tls import Authority

pytestmark = needs_etcd


@pytest.fixture
def started(tmp_path: pathlib.Path) -> Iterator[Callable[..., Cluster]]:
    """Yield a function that starts clusters, which end with the test."""
    clusters: list[Cluster] = []

    def start(options: Sequence[str] = (), waits: bool = True) -> Cluster:
        folder = tmp_path / f"cluster{len(clusters)}"
        folder.mkdir()
        clusters.append(Cluster(folder, options=options))
        if waits:
            clusters[-1].leader()
        return clusters[-1]

    yield start
    for each in clusters:
        each.close()


Start = Callable[..., Cluster]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield a cluster for the tests that do not harm it."""
    made = Cluster(tmp_path_factory.mktemp("etcd"))
    made.leader()
    yield made
    made.close()


@pytest.fixture
def address(cluster: Cluster) -> str:
    """Return the address of the cluster, with a prefix of the test's own."""
    return f"{cluster.address()}/{secrets.token_hex(6)}"


def test_ttls_are_whole_seconds(address: str, connected: Connect) -> None:
    client = connected(address)
    for asked, granted in ((0.1, 2.0), (1.0, 2.0), (2.5, 3.0), (7.0, 7.0)):
        began, lease = time.monotonic(), client.grant(asked)
        assert lease.ttl == granted
        assert began + granted <= lease.ends <= time.monotonic() + granted
        renewed = client.renew(lease)
        assert lease.ends < renewed.ends <= time.monotonic() + granted


def test_endpoints_that_do_not_answer_leave_time_for_a_renewal(cluster: Cluster, connected: Connect) -> None:
    node = cluster.nodes[0]
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [one.getsockname()[1], other.getsockname()[1], node.port]
        client = connected("etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports))
        lease = client.grant(3.0)
        client._client.sessions.current = 0
        with takes_less_than(2 / 3 * lease.ttl):  # a renewal is due after a third
            lease = client.renew(lease)


def test_groups_with_other_prefixes_see_nothing_of_each_other(started: Start, connected: Connect) -> None:
    address = started().address()
    one, other, longer = (connected(address + path) for path in ("", "/jobs/7", "/jobs/77"))
    entries = [written(client.swap("a", b"%d" % n)) for n, client in enumerate((one, other, longer))]
    for client, entry in zip((one, other, longer), entries, strict=True):
        assert client.list("").entries == (entry,)
        assert client.watch("", entries[0].revision - 1, SOON)[1][0].entry == entry
    assert connected(address + "/telegrad/").list("").entries == (entries[0],)  # the default prefix


def test_watches_leave_no_stream_behind(cluster: Cluster, address: str, connected: Connect) -> None:
    client = connected(address)
    since, revision = client.list("").revision, 0
    for _ in range(5):
        revision = written(client.swap("a", b"", revision)).revision
        since, events = client.watch("", since, SOON)
        assert ([event.revision for event in events], client.watch("", since, 0.0)) == ([revision], (since, []))
    wait_until(lambda: not cluster.nodes[0].watchers())  # etcd needs a moment to see that a stream was closed


def test_a_watch_goes_on_after_a_silence(address: str, connected: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd, "SILENCE", 0.1)
    client, writer = connected(address), connected(address)
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(client.watch, "", client.list("").revision, LONG)
        for _ in range(4):
            assert client.watch("b", 1, 0.15)[1] == []
        entry = written(writer.swap("a", b""))
        assert watching.result(PATIENCE)[1] == [Event(entry.revision, "a", entry)]


def test_lost_data_of_etcd_is_noticed(started: Start, connected: Connect) -> None:
    """Otherwise tokens would be given a second time."""
    cluster = started()
    node = cluster.nodes[0]
    client, watching = connected(cluster.address()), connected(cluster.address())
    revision = 0
    for _ in range(20):
        revision = written(client.swap("a", b"", revision)).revision
    assert watching.watch("", revision, 0.1)[1] == []
    cluster.kill()
    shutil.rmtree(node.folder / node.name)
    cluster.start()
    with pytest.raises(DirectoryReset, match=f"went back from revision {revision} to [12]: .* new group"):
        client.swap("b", b"")
    with pytest.raises(DirectoryReset, match="went back"):
        client.list("")
    with pytest.raises(DirectoryReset, match="went back"):
        watching.watch("", revision, LONG)


def test_endpoints_of_two_clusters_are_refused(started: Start, connected: Connect) -> None:
    one, other = started(), started()
    client = connected(f"{one.address()},{other.address().removeprefix('etcd://')}")
    client.list("")
    (one if client._client.sessions.current == 0 else other).kill()
    with pytest.raises(DirectoryReset, match="different clusters"):
        client.list("")


def test_etcd_without_its_gateway_is_refused(started: Start, connected: Connect) -> None:
    cluster = started(options=["--enable-grpc-gateway=false"], waits=False)
    with pytest.raises(DirectoryRefused, match="--enable-grpc-gateway"):
        connected(cluster.address()).list("")


def test_users_are_limited_to_their_prefix(started: Start, connected: Connect, tmp_path: pathlib.Path) -> None:
    cluster = started(options=["--auth-token-ttl", "1"])
    node, key = cluster.nodes[0], base64.b64encode(b"telegrad/").decode()
    file = tmp_path / "password"
    file.write_text("secret\n")
    file.chmod(0o600)
    user = connected(f"{cluster.address()}?user=worker&password_file={file}")
    with pytest.raises(DirectoryRefused, match="not enabled"):
        user.list("")
    for name, password in (("root", "r"), ("worker", "secret")):
        node.post("/v3/auth/user/add", {"name": name, "password": password})
    node.post("/v3/auth/role/add", {"name": "root"})
    node.post("/v3/auth/role/add", {"name": "group"})
    permission = {"permType": "READWRITE", "key": key, "range_end": base64.b64encode(b"telegrad0").decode()}
    node.post("/v3/auth/role/grant", {"name": "group", "perm": permission})
    node.post("/v3/auth/user/grant", {"user": "root", "role": "root"})
    node.post("/v3/auth/user/grant", {"user": "worker", "role": "group"})
    node.post("/v3/auth/enable", {})

    lease = user.grant(LONG)
    entry = written(user.swap("a", b"1", lease=lease))
    assert user.watch("", entry.revision - 1, SOON)[1][0].entry == entry
    cluster.kill()  # the tokens of the server are gone
    cluster.start()
    assert (user.list("").entries, user.renew(lease).id) == ((entry,), lease.id)
    second = written(user.swap("a", b"2", entry.revision, lease))
    assert user.watch("", entry.revision, SOON)[1][0].entry == second

    with pytest.raises(DirectoryRefused, match="user=NAME"):
        connected(cluster.address()).list("")
    with pytest.raises(DirectoryRefused, match="permission denied"):
        connected(f"{cluster.address()}/elsewhere?user=worker&password_file={file}").list("")
    file.write_text("wrong")
    with pytest.raises(DirectoryRefused, match="authentication failed"):
        connected(f"{cluster.address()}?user=worker&password_file={file}").list("")


def test_tls_with_client_certificates(connected: Connect, tmp_path: pathlib.Path) -> None:
    authority = Authority(tmp_path, "authority")
    server, client = authority.files("server"), authority.files("client")
    options = ["--cert-file", server.certificate, "--key-file", server.private_key, "--client-cert-auth"]
    cluster = Cluster(tmp_path, options=[*options, "--trusted-ca-file", authority.path], scheme="https")
    query = f"?ca={authority.path}&cert={client.certificate}&key={client.private_key}"
    try:
        directory = connected(cluster.address() + query)
        entry = written(directory.swap("a", b"1" * 300_000))
        assert directory.watch("", entry.revision - 1, SOON)[1][0].entry == entry
        assert directory.watch("", entry.revision, 0.3)[1] == []
        with pytest.raises(DirectoryLost, match=r"ca=FILE if it uses TLS"):
            connected(cluster.address(), 1.0).list("")
        with pytest.raises(DirectoryRefused, match="not accepted"):
            connected(cluster.address() + "?ca=system").list("")
        with pytest.raises(DirectoryLost):  # etcd requires a certificate of the client
            connected(cluster.address() + query.partition("&")[0], 1.0).list("")
        closes_while_watching(directory, entry.revision)
    finally:
        cluster.close()


def closes_while_watching(directory: EtcdDirectory, revision: int) -> None:
    early = takes_less_than(etcd.SILENCE / 2)  # before the watch would be opened anew
    with in_background(directory.close, after=0.2), early, pytest.raises(DirectoryLost, match="closed"):
        directory.watch("", revision, LONG)


def test_a_write_after_a_restart_has_an_outcome(started: Start, connected: Connect) -> None:
    """Connections that the server has closed are not used for the write."""
    cluster = started()
    directory = connected(cluster.address())
    entry = written(directory.swap("a", b""))
    cluster.kill()
    cluster.start()
    cluster.leader()
    written(directory.swap("a", b"", entry.revision))
