"""Drives redis-py, kazoo and SQLAlchemy through the line protocol of `src/job.rs`: one job, a thread for each task."""

import json
import logging
import sys
import threading
import time
from urllib.parse import urlsplit

clock = time.monotonic_ns


class Rows:
    """The row in PostgreSQL that all tasks read and write, over one autocommit connection for each thread."""

    def __init__(self, job):
        import psycopg

        self.job = job
        self.local = threading.local()
        self.connect = lambda: psycopg.connect(job["url"], autocommit=True)

    def raise_by_one(self):
        if self.job["scenario"] != "hot-row":
            return
        conn = getattr(self.local, "conn", None)
        if conn is None:
            conn = self.local.conn = self.connect()
        value = conn.execute("SELECT value FROM bench_row WHERE id = 0").fetchone()[0]
        conn.execute("UPDATE bench_row SET value = %s WHERE id = 0", (value + 1,))


class RedisPy:
    """`redis.lock.Lock` with its defaults, but for the ttl and the time to wait."""

    def __init__(self, job):
        import redis

        self.client = redis.Redis.from_url(job["redis"])
        self.rows = Rows(job)

    def once(self, key):
        lock = self.client.lock(f"key:{key}", timeout=30, blocking_timeout=60)
        if not lock.acquire():
            return None
        granted = clock()
        self.rows.raise_by_one()
        let_go = clock()
        lock.release()
        return granted, let_go, 1


class Kazoo:
    """`kazoo.recipe.lock.Lock` on one session for the process."""

    def __init__(self, job):
        from kazoo.client import KazooClient

        self.client = KazooClient(hosts=job["zookeeper"])
        self.client.start()
        self.rows = Rows(job)

    def once(self, key):
        lock = self.client.Lock(f"/bench/key:{key}", "bench")
        if not lock.acquire(timeout=60):
            return None
        granted = clock()
        self.rows.raise_by_one()
        let_go = clock()
        lock.release()
        return granted, let_go, 1


class SqlAlchemy:
    """One row, written by the ORM under `with_for_update` or with `version_id_col`."""

    def __init__(self, job, is_versioned):
        from sqlalchemy import BigInteger, Column, create_engine
        from sqlalchemy.orm import declarative_base, sessionmaker

        base = declarative_base()

        class Row(base):
            __tablename__ = "bench_row"
            id = Column(BigInteger, primary_key=True)
            value = Column(BigInteger)
            version = Column(BigInteger)
            if is_versioned:
                __mapper_args__ = {"version_id_col": version}

        url = urlsplit(job["url"])
        address = f"postgresql+psycopg://{url.netloc}{url.path}"
        engine = create_engine(address, pool_size=job["connections"], max_overflow=0)
        self.row, self.session, self.is_versioned = Row, sessionmaker(engine), is_versioned

    def once(self, _key):
        from sqlalchemy.orm.exc import StaleDataError

        attempts = 0
        while True:
            attempts += 1
            with self.session() as session:
                row = session.get(self.row, 0, with_for_update=not self.is_versioned or None)
                granted = clock()
                row.value += 1
                try:
                    session.flush()
                    let_go = clock()
                    session.commit()
                    return granted, let_go, attempts
                except StaleDataError:
                    session.rollback()


PEERS = {
    "redis-py": RedisPy,
    "kazoo": Kazoo,
    "SQLAlchemy with_for_update": lambda job: SqlAlchemy(job, False),
    "SQLAlchemy version_id_col": lambda job: SqlAlchemy(job, True),
}


def version(name):
    """The version of the library, or an ImportError."""
    if name.startswith("SQLAlchemy"):
        import psycopg
        import sqlalchemy

        return f"{sqlalchemy.__version__}, psycopg {psycopg.__version__}"
    if name == "kazoo":
        import psycopg  # noqa: F401
        from kazoo.version import __version__

        return __version__
    import psycopg  # noqa: F401
    import redis

    return redis.__version__


def task(peer, job, number, began, end, seen, failures):
    import random

    own = job["process"] * job["tasks"] + number
    try:
        while True:
            key = own if job["keys"] == 0 else random.randrange(job["keys"])
            asked = clock()
            step = peer.once(key)
            done = clock()
            if step is None:
                seen["refused"] += 1
            else:
                granted, let_go, attempts = step
                operations = seen["operations"]
                operations["key"].append(key)
                operations["asked"].append(asked - began)
                operations["granted"].append(granted - began)
                operations["let_go"].append(let_go - began)
                operations["done"].append(done - began)
                seen["attempts"] += attempts
            if clock() >= end:
                return
    except Exception as err:  # The process ends with it.
        failures.append(err)
        raise


def work(peer, job, milliseconds):
    """Lets all threads work, and sums up what they have seen."""
    columns = ("key", "asked", "granted", "let_go", "done")
    began, cpu = clock(), time.process_time_ns()
    end = began + milliseconds * 1_000_000
    new = lambda: {"attempts": 0, "refused": 0, "operations": {name: [] for name in columns}}
    parts = [new() for _ in range(job["tasks"])]
    failures = []
    threads = [
        threading.Thread(target=task, args=(peer, job, number, began, end, part, failures))
        for number, part in enumerate(parts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    seen = {"began": began, "cpu_us": (time.process_time_ns() - cpu) // 1_000, **new()}
    for part in parts:
        seen["attempts"] += part["attempts"]
        seen["refused"] += part["refused"]
        for name in columns:
            seen["operations"][name] += part["operations"][name]
    return seen


def say(value):
    print(json.dumps(value), flush=True)


def main():
    if sys.argv[1:2] == ["--version"]:
        print(version(sys.argv[2]))
        return
    logging.disable(logging.CRITICAL)
    job = json.loads(sys.stdin.readline())
    peer = PEERS[job["contender"]](job)
    warm = work(peer, job, 0)
    say({"ready": {"done": len(warm["operations"]["key"])}})
    sys.stdin.readline()
    say({"finished": work(peer, job, job["warm_ms"] + job["run_ms"])})
    sys.stdout.flush()
    # Without waiting for the threads of the libraries.
    import os

    os._exit(0)


main()
