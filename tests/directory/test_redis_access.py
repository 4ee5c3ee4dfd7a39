"""Tests of Redis servers that a directory refuses, and of logins."""

import pathlib
import re

import pytest

from telegrad._core.stores.directory import DirectoryLost, DirectoryRefused
from telegrad.directories.on_redis import RedisDirectory
from telegrad.directories.redis_messages import RIGHTS
from telegrad.errors import UsageError
from tests.cluster import free_port, takes_less_than
from tests.directory.harness import SOON, written
from tests.directory.redis_server import NEEDED, running
from tests.transport.test_tls import Authority

pytestmark = NEEDED


@pytest.mark.parametrize(
    ("setting", "value", "says"),
    [
        ("appendonly", "no", r"\(appendonly is no\): set `appendonly yes` in redis\.conf, or with CONFIG SET"),
        ("appendfsync", "everysec", r"\(appendfsync is everysec\): set `appendfsync always` in"),
        ("no_appendfsync_on_rewrite", "yes", "set `no-appendfsync-on-rewrite no` in"),
        ("maxmemory_policy", "allkeys-lfu", "deletes keys when memory is full .*set `maxmemory-policy noeviction`"),
        ("replicaof", "127.0.0.1 1", r"it is a replica: use the address of its master at 127\.0\.0\.1:1"),
        ("cluster_enabled", "yes", "Redis Cluster: use a standalone server"),
    ],
)
def test_a_server_with_unfit_settings_is_refused(tmp_path: pathlib.Path, setting: str, value: str, says: str) -> None:
    with running(tmp_path, **{setting: value}) as server:
        told = f"redis://127.0.0.1:{server.port}/0 cannot hold.*{says}"
        with takes_less_than(SOON), pytest.raises(DirectoryRefused, match=told):
            server.client()
        assert server.admin().keys("*") == []


def test_the_next_connection_notices_changed_settings(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as server:
        client = server.client()
        server.admin().config_set("appendfsync", "no")
        client.swap("a", b"")
        server.kill()
        server.settings["appendfsync"] = "no"
        server.start()
        with pytest.raises(DirectoryRefused, match="appendfsync is no"):
            client.list("")
        server.admin().config_set("appendfsync", "always")
        assert len(client.list("").entries) == 1


def test_logins_are_checked_and_wrong_passwords_are_not_shown(tmp_path: pathlib.Path) -> None:
    with running(tmp_path, requirepass="right/word") as server:
        place = f"127.0.0.1:{server.port}"
        for login in ("", ":wrong@", "default:wrong@", "nobody:right%2Fword@"):
            with pytest.raises(DirectoryRefused, match=r"refuses the login .*in the URL") as caught:
                RedisDirectory(f"redis://{login}{place}", "group")
            assert "wrong" not in str(caught.value).replace("WRONGPASS", "")
        for login in (":right%2Fword@", "default:right%2Fword@"):
            assert RedisDirectory(f"redis://{login}{place}/2", "group").swap(login, b"").done


def test_the_refusal_of_a_login_is_raised_without_other_errors(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as server:
        client, admin = server.client(), server.admin()
        admin.config_set("requirepass", "word")
        admin.execute_command("CLIENT", "KILL", "TYPE", "normal")
        with pytest.raises(DirectoryRefused, match="refuses the login") as caught:
            client.list("")
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None
        admin.execute_command("CONFIG", "SET", "requirepass", "")
        admin.replicaof("127.0.0.1", "1")
        with pytest.raises(DirectoryRefused, match="it is a replica") as caught:
            client.list("")
        assert caught.value.__cause__ is caught.value.__context__ is None


def test_a_user_needs_only_the_documented_rights(tmp_path: pathlib.Path) -> None:
    with running(tmp_path) as server:
        rights = RIGHTS.replace("telegrad:*", "telegrad:mine:*").split()
        server.admin().execute_command("ACL", "SETUSER", "me", "on", ">word", *rights)
        url = f"redis://me:word@127.0.0.1:{server.port}/1"
        client = RedisDirectory(url, "mine")
        lease = client.grant(10)
        entry = written(client.swap("a", b"", lease=lease))
        assert client.watch("", 0, SOON)[1][0].entry == entry
        client.revoke(lease)
        assert client.watch("b", 2, 0.1) == (2, [])
        with pytest.raises(DirectoryRefused, match=re.escape(RIGHTS)):
            RedisDirectory(url, "other")
        server.admin().execute_command("ACL", "SETUSER", "me", "-config")
        with pytest.raises(DirectoryRefused, match=re.escape(RIGHTS)):
            RedisDirectory(url, "mine")


def test_a_server_without_config_cannot_be_checked(tmp_path: pathlib.Path) -> None:
    with (
        running(tmp_path, rename_command='CONFIG ""') as server,
        pytest.raises(DirectoryRefused, match=r"unknown command 'CONFIG'.*without CONFIG cannot be used"),
    ):
        server.client()


def test_tls_checks_the_server_and_the_files(tmp_path: pathlib.Path) -> None:
    authority, stranger = Authority(tmp_path, "authority"), Authority(tmp_path, "stranger")
    served, own = authority.files("server"), authority.files("client")
    paths = {
        "tls_cert_file": served.certificate,
        "tls_key_file": served.private_key,
        "tls_ca_cert_file": authority.path,
    }
    port = str(free_port())
    with running(tmp_path, port="0", tls_port=port, tls_auth_clients="no", **paths) as server:
        url = f"rediss://127.0.0.1:{port}"
        trusting = f"{url}?ssl_ca_certs={authority.path}"
        client = RedisDirectory(trusting, "group")
        assert client.swap("a", b"x" * 100_000).done
        assert client.watch("b", 1, 0.2) == (1, [])
        for ca in (f"?ssl_ca_certs={stranger.path}", ""):
            with pytest.raises(DirectoryLost, match="certificate verify failed"):
                RedisDirectory(url + ca, "group", patience=0.5)
        certified = f"{trusting}&ssl_certfile={own.certificate}&ssl_keyfile={own.private_key}"
        assert RedisDirectory(certified, "group").list("").entries
        pathlib.Path(own.private_key).chmod(0o644)
        with pytest.raises(UsageError, match=r"client.pem' for Redis with key .*-key.pem' cannot be used.*chmod 600"):
            RedisDirectory(certified, "group")
        server.pause()
        with takes_less_than(0.5 + SOON), pytest.raises(DirectoryLost):
            RedisDirectory(trusting, "group", patience=0.5)
