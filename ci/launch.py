"""What ci/launch does; its usage is there."""

import argparse
import contextlib
import ctypes
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

HELD, USAGE, BROKEN, SKIPPED, TIMED_OUT = 0, 2, 70, 77, 124
KNOWN_CODES = {0, 1, 2, 3, 4, 70, 124}
TERM_PATIENCE = 5.0  # seconds between SIGTERM and SIGKILL
HERE = pathlib.Path(__file__).resolve()
IN_NAMESPACE = "SHARDPROOF_LAUNCH_IN_NAMESPACE"

# What a launcher around this one may have set; the ranks must see only their own.
FOREIGN_PREFIXES = (
    "OMPI_",
    "PMIX_",
    "PMI_",
    "MPI_LOCAL",
    "SLURM_",
    "TORCHELASTIC_",
    "HYDRA_",
    "HYDI_",
    "PRTE_",
)
FOREIGN = {
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
RANK_VARIABLES = {
    "torchrun": "RANK",
    "none": "RANK",
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpich": "PMI_RANK",
    "slurm": "SLURM_PROCID",
}


class CannotDoIt(Exception):
    """This machine lacks something: exit 77."""


def say(text):
    print(f"ci/launch: {text}", file=sys.stderr, flush=True)


def need(program, package):
    found = shutil.which(program)
    if found is None:
        raise CannotDoIt(f"{program} is not there; it is in the Debian package {package}")
    return found


def clean_environment():
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
    kept.setdefault("OMP_NUM_THREADS", "1")
    # TCPStore asks the name service for its peers; one that does not answer must not cost 5 s a time.
    kept.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    return kept


def free_port(host="127.0.0.1"):
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


# ---- One rank: what the launcher starts N times ----


def run_as_rank(arguments):
    """Runs the program as this rank, prefixes its output, and leaves how it ended in the scratch folder."""
    launcher, scratch, program = arguments[0], pathlib.Path(arguments[1]), arguments[2:]
    rank = os.environ.get(RANK_VARIABLES[launcher], "?")
    record = scratch / f"rank-{rank}.json"
    libc = ctypes.CDLL(None)

    def die_with_us():
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

    # In a session of its own, so that a signal to the launcher's group reaches it once, by way of us.
    try:
        child = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            close_fds=False,  # MPICH's ranks talk to their mpirun through one (PMI_FD)
            preexec_fn=die_with_us,
        )
    except OSError as error:
        print(f"[{rank}] cannot start {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        write_record(record, {"code": USAGE})
        return USAGE
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: child.send_signal(got))

    def copy_lines(source, target):
        for line in source:
            text = line if line.endswith(b"\n") else line + b"\n"
            with contextlib.suppress(OSError):  # the reader may be gone
                os.write(target, f"[{rank}] ".encode() + text)

    readers = [
        threading.Thread(target=copy_lines, args=(child.stdout, 1), daemon=True),
        threading.Thread(target=copy_lines, args=(child.stderr, 2), daemon=True),
    ]
    for reader in readers:
        reader.start()
    code = child.wait()
    for reader in readers:
        reader.join(timeout=2)  # a grandchild may hold the pipe open
    write_record(record, {"code": code} if code >= 0 else {"signal": -code})
    return code if code >= 0 else 128 - code


def write_record(path, record):
    record["time"] = time.monotonic()
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(record))
    beside.rename(path)


# ---- The process tree ----


class Tree:
    """All that descends from us. What loses its parent comes to us, so that nothing gets away."""

    def __init__(self):
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self.known = {}  # our own children by process id

    def start(self, command, **options):
        child = subprocess.Popen(command, start_new_session=True, **options)
        self.known[child.pid] = child
        return child

    def alive(self):
        """The process ids of living descendants. Reaps those that came to us and ended."""
        parents = {}
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                # "pid (name) state parent ...", where the name may have spaces and brackets.
                fields = pathlib.Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                parents[int(entry)] = (fields[0], int(fields[1]))
        living, level = [], {os.getpid()}
        while level:
            level = {pid for pid, (_, parent) in parents.items() if parent in level}
            living += [pid for pid in level if parents[pid][0] != "Z"]
            for pid in level:
                if parents[pid][0] == "Z" and parents[pid][1] == os.getpid():
                    self.reap(pid)
        return living

    def reap(self, pid):
        if pid in self.known:
            self.known[pid].poll()
        else:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def end(self):
        """SIGTERM, patience, SIGKILL. True if nothing is left."""
        signalled = set()
        deadline = time.monotonic() + TERM_PATIENCE
        while (living := self.alive()) and time.monotonic() < deadline:
            for pid in set(living) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)  # one that is stopped cannot heed it
            signalled.update(living)
            time.sleep(0.05)
        deadline = time.monotonic() + TERM_PATIENCE
        while (living := self.alive()) and time.monotonic() < deadline:
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        return not self.alive()


# ---- The launchers: each gives the commands to start, with their environments ----


class Plan:
    def __init__(self, options, scratch, tree):
        self.options = options
        self.scratch = scratch
        self.tree = tree
        self.environment = clean_environment()

    def rank_command(self):
        return [
            sys.executable, "-B", str(HERE), "--as-rank", self.options.launcher, str(self.scratch),
            *self.options.program,
        ]  # fmt: skip

    def master(self):
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


class None_(Plan):
    def commands(self):
        ranks = self.options.ranks
        master = self.master()
        for rank in range(ranks):
            place = {
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks),
            }
            yield self.rank_command(), self.environment | master | place


def torchrun():
    """The torchrun of the project's own Python, else the first in PATH."""
    build = os.environ.get("SHARDPROOF_BUILD_DIR", HERE.parent.parent / "build")
    places = [pathlib.Path(build) / "venv/bin/torchrun"]
    if "SHARDPROOF_PYTHON" in os.environ:
        places.insert(0, pathlib.Path(os.environ["SHARDPROOF_PYTHON"]).parent / "torchrun")
    for place in places:
        if place.exists():
            return str(place)
    found = shutil.which("torchrun")
    if found is None:
        raise CannotDoIt("torchrun is not there; ci/setup installs it")
    return found


class Torchrun(Plan):
    def commands(self):
        nodes, ranks = self.options.nodes, self.options.ranks
        if nodes == 1:
            yield self.command(0, "127.0.0.1", free_port()), self.environment
            return
        network = Network(self.scratch, nodes)
        order = list(range(nodes))
        random.shuffle(order)
        say(f"{nodes} nodes of {ranks // nodes} ranks, started in the order {order}")
        port = 29500  # the nodes have networks of their own, so it is free
        for node in order:
            yield (
                network.inside(node, self.command(node, network.address(0), port)),
                self.environment,
            )

    def command(self, node, address, port):
        nodes = self.options.nodes
        return [
            torchrun(), "--no-python", f"--nproc_per_node={self.options.ranks // nodes}", f"--nnodes={nodes}",
            f"--node_rank={node}", f"--master_addr={address}", f"--master_port={port}", *self.rank_command(),
        ]  # fmt: skip


class OpenMpi(Plan):
    def commands(self):
        mpirun = need("mpirun.openmpi", "openmpi-bin")
        command = [mpirun, "-n", str(self.options.ranks), "--oversubscribe", "--bind-to", "none"]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        # Its way to copy between processes needs a right that containers do not give; it works without.
        command += ["--mca", "btl_vader_single_copy_mechanism", "none"]
        environment = self.environment | self.master()
        if self.options.nodes > 1:
            network = Network(self.scratch, self.options.nodes)
            command += network.openmpi_arguments(self.options.ranks // self.options.nodes)
            environment |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": "29500"}
            for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"):
                command += ["-x", name]
            yield network.inside(0, command + self.rank_command()), environment
            return
        yield command + self.rank_command(), environment


class Mpich(Plan):
    def commands(self):
        mpirun = need("mpirun.mpich", "mpich")
        command = [mpirun, "-n", str(self.options.ranks), *self.rank_command()]
        yield command, self.environment | self.master()


class Slurm(Plan):
    """A Slurm of one node, whose every file, key, socket and port is its own."""

    def commands(self):
        programs = {
            "munged": "munge",
            "slurmctld": "slurmctld",
            "slurmd": "slurmd",
            "srun": "slurm-client",
        }
        self.paths = {name: self.find(name, package) for name, package in programs.items()}
        if os.geteuid() != 0:
            raise CannotDoIt(
                "slurmd must run as root, to become the user of a job; run this as root"
            )
        self.folder = self.scratch / "slurm"
        for name in ("", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        self.start_munge()
        self.write_configuration()
        self.start_daemons()
        command = [
            self.paths["srun"], "-n", str(self.options.ranks), "--overcommit", "--kill-on-bad-exit=1", "--mpi=none",
            *self.rank_command(),
        ]  # fmt: skip
        yield command, self.environment | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    @staticmethod
    def find(name, package):
        found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
        if found is None:
            raise CannotDoIt(f"{name} is not there; it is in the Debian package {package}")
        return found

    def start_munge(self):
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        self.socket = self.folder / "munge.socket"
        self.daemon(
            "munged", "--foreground", "--force", f"--socket={self.socket}", f"--key-file={key}",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self.wait_for("munged", self.socket.exists)

    def write_configuration(self):
        host = socket.gethostname().split(".")[0]
        cores = os.cpu_count()
        lines = {
            "ClusterName": "shardproof",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmctldPort": free_port(),
            "SlurmdPort": free_port(),
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self.socket}",
            "CredType": "cred/munge",
            "CryptoType": None,
            "MpiDefault": "none",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SwitchType": "switch/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "ReturnToService": 2,
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd.pid",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": self.folder / "slurmd.log",
            "KillWait": 5,
        }
        text = "".join(f"{name}={value}\n" for name, value in lines.items() if value is not None)
        text += f"NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN\n"
        text += f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:64\n"
        (self.folder / "slurm.conf").write_text(text)
        self.host = host

    def start_daemons(self):
        configuration = str(self.folder / "slurm.conf")
        self.daemon("slurmctld", "-D", "-f", configuration)
        self.daemon("slurmd", "-D", "-N", self.host, "-f", configuration)
        environment = self.environment | {"SLURM_CONF": configuration}
        probe = [self.paths["srun"], "-n", "1", "--mpi=none", "--immediate=5", "true"]

        def runs_a_task():
            try:
                return (
                    subprocess.run(
                        probe, env=environment, capture_output=True, timeout=10
                    ).returncode
                    == 0
                )
            except subprocess.TimeoutExpired:
                return False

        self.wait_for("slurmd", runs_a_task)

    def daemon(self, name, *arguments):
        with open(self.folder / f"{name}.out", "wb") as output:
            child = self.tree.start(
                [self.paths[name], *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
            )
        self.last = child

    def wait_for(self, name, is_ready, seconds=40):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.last.poll() is None:
            if is_ready():
                return
            time.sleep(0.1)
        logs = ""
        for log in sorted(self.folder.glob("*.log")) + sorted(self.folder.glob("*.out")):
            logs += f"\n{log.name}: " + "; ".join(log.read_text(errors="replace").splitlines()[-4:])
        raise CannotDoIt(f"a Slurm of its own cannot be started here: {name} is not ready{logs}")


class Network:
    """Network namespaces joined by a bridge, each with an address of its own. They are ours alone: we run in
    namespaces of our own (see enter_namespace), and they end with the last process in them."""

    def __init__(self, scratch, nodes):
        self.scratch = scratch
        self.nodes = nodes
        hosts = pathlib.Path("/etc/hosts").read_text()
        hosts += "".join(f"{self.address(node)} {self.name(node)}\n" for node in range(nodes))
        (scratch / "hosts").write_text(hosts)
        self.run("mount", "--bind", str(scratch / "hosts"), "/etc/hosts")
        pathlib.Path("/run/netns").mkdir(exist_ok=True)
        self.run("mount", "-t", "tmpfs", "tmpfs", "/run/netns")
        self.run("ip", "link", "set", "lo", "up")
        self.run("ip", "link", "add", "hub", "type", "bridge")
        self.run("ip", "link", "set", "hub", "up")
        for node in range(nodes):
            self.add(self.name(node), f"port{node}", self.address(node))

    def add(self, name, port, address):
        self.run("ip", "netns", "add", name)
        self.run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
        self.run("ip", "link", "set", port, "master", "hub", "up")
        self.run("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        self.run("ip", "-n", name, "link", "set", "eth0", "up")
        self.run("ip", "-n", name, "link", "set", "lo", "up")

    @staticmethod
    def run(*command):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            reason = done.stderr.strip() or f"exit code {done.returncode}"
            raise CannotDoIt(f"no network namespaces here: {' '.join(command)}: {reason}")

    @staticmethod
    def name(node):
        return f"node{node}"

    @staticmethod
    def address(node):
        return f"10.77.0.{node + 1}"

    def inside(self, node, command):
        """The command, on that node, with its host name."""
        set_name = 'hostname "$0" && exec "$@"'
        name = self.name(node)
        return [
            "ip",
            "netns",
            "exec",
            name,
            "unshare",
            "--uts",
            "sh",
            "-c",
            set_name,
            name,
            *command,
        ]

    def openmpi_arguments(self, slots):
        """Open MPI starts its daemons by a program like ssh; ours enters the node's namespace."""
        agent = self.scratch / "enter-node"
        agent.write_text(
            "#!/bin/sh\n# enter-node NODE COMMAND...: as ssh does, the words become one line for a shell.\n"
            'node=$1\nshift\nexec ip netns exec "$node" unshare --uts sh -c "hostname $node && $*"\n'
        )
        agent.chmod(0o755)
        hosts = ",".join(f"{self.name(node)}:{slots}" for node in range(self.nodes))
        return [
            "--host", hosts, "--mca", "plm_rsh_agent", str(agent), "--mca", "btl_tcp_if_include", "10.77.0.0/24",
            "--mca", "oob_tcp_if_include", "10.77.0.0/24",
        ]  # fmt: skip


def enter_namespace():
    """Starts this program again with a network and a table of mounts of its own; both end with it."""
    if os.environ.get(IN_NAMESPACE) == str(os.getpid()):
        return
    if os.geteuid() != 0:
        raise CannotDoIt("--nodes needs root, to make network namespaces")
    need("ip", "iproute2")
    unshare = [need("unshare", "util-linux"), "--mount", "--net"]
    done = subprocess.run([*unshare, "true"], capture_output=True, text=True)
    if done.returncode != 0:
        raise CannotDoIt(f"no namespaces here: {done.stderr.strip()}")
    os.environ[IN_NAMESPACE] = str(os.getpid())  # unshare without --fork keeps the process id
    os.execv(unshare[0], [*unshare, sys.executable, "-B", str(HERE), *sys.argv[1:]])


PLANS = {"none": None_, "torchrun": Torchrun, "openmpi": OpenMpi, "mpich": Mpich, "slurm": Slurm}


# ---- The run ----


class Signalled(Exception):
    pass


def watch(children, tree, deadline):
    """Waits until all have ended. Raises TimeoutError, or Signalled."""
    while any(child.poll() is None for child in children):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def judge(options, scratch, children):
    """One exit code from what the ranks left, and why, if it is not plain from their output."""
    records = {}
    for path in scratch.glob("rank-*.json"):
        records[path.stem.removeprefix("rank-")] = json.loads(path.read_text())
    codes = {rank: record["code"] for rank, record in records.items() if "code" in record}
    worst = max((code if code in KNOWN_CODES else BROKEN for code in codes.values()), default=HELD)
    if codes and len(codes) == options.ranks and set(codes.values()) == {SKIPPED}:
        return SKIPPED
    signals = {rank: record for rank, record in records.items() if "signal" in record}
    for rank, record in sorted(signals.items()):
        say(f"rank {rank} ended by signal {record['signal']}")
    if worst != HELD:
        return worst
    if signals:
        return BROKEN
    launcher = max((abs(child.returncode) for child in children), default=0)
    if launcher != 0:
        say(f"{options.launcher} ended with {launcher}, though no rank did")
        return BROKEN
    missing = [str(rank) for rank in range(options.ranks) if str(rank) not in records]
    if missing:
        say(f"these ranks never ran: {', '.join(missing)}")
        return BROKEN
    return HELD


def launch(options, scratch):
    tree = Tree()
    got = []

    def note(number, _):
        got.append(number)
        raise Signalled

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    plan = PLANS[options.launcher](options, scratch, tree)
    children = []
    code = None
    try:
        for command, environment in plan.commands():
            children.append(tree.start(command, env=environment, stdin=subprocess.DEVNULL))
        watch(children, tree, time.monotonic() + options.timeout)
    except TimeoutError:
        say(f"not over after {options.timeout:g} s; ending {len(tree.alive())} processes")
        code = TIMED_OUT
    except Signalled:
        code = 128 + got[0]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(got[0])
        # They may end by themselves; a second signal means now.
        with contextlib.suppress(TimeoutError, Signalled):
            watch(children, tree, time.monotonic() + TERM_PATIENCE)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if code is None and sys.exc_info()[0] is None:
            code = judge(options, scratch, children)
        if options.launcher != "slurm" and code == HELD and (left := tree.alive()):
            say(f"the ranks have ended and left {len(left)} processes behind")
            code = BROKEN
        if not tree.end():
            say("some processes cannot be ended")
            code = BROKEN
    return code


def parse(arguments):
    parser = argparse.ArgumentParser(prog="ci/launch", add_help=False, allow_abbrev=False)
    parser.add_argument("--with", dest="launcher", choices=sorted(PLANS), required=True)
    parser.add_argument("-n", dest="ranks", type=int, required=True)
    parser.add_argument("--timeout", type=float, default=300.0)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("program", nargs="+")
    options = parser.parse_args(arguments)
    if (
        options.ranks < 1
        or options.timeout <= 0
        or options.nodes < 1
        or options.ranks % options.nodes
    ):
        parser.error("-n, --nodes and --timeout must be positive, and -n a multiple of --nodes")
    if options.nodes > 1 and options.launcher not in ("torchrun", "openmpi"):
        parser.error("--nodes works with torchrun and openmpi")
    return options


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--as-rank"]:
        return run_as_rank(arguments[1:])
    if arguments[:1] in (["-h"], ["--help"]):
        lines = (HERE.parent / "launch").read_text().splitlines()[1:]
        print("\n".join(line[2:] for line in lines[: lines.index("")]))
        return HELD
    options = parse(arguments)
    try:
        if options.nodes > 1:
            enter_namespace()
        with tempfile.TemporaryDirectory(prefix="shardproof-launch-") as scratch:
            os.chmod(scratch, 0o755)
            return launch(options, pathlib.Path(scratch))
    except CannotDoIt as reason:
        say(f"cannot do it: {reason}")
        return SKIPPED


if __name__ == "__main__":
    sys.exit(main())
