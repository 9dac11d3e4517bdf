//! ZooKeeper servers: one alone, or an ensemble. They tick five times a second, so sessions of 400 ms are possible.

use std::{
    fs,
    io::{Read, Write},
    net::TcpStream,
    sync::{OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};

use crate::{
    folder::Folder,
    program::{Program, free_port},
};

/// Longer than an ensemble takes to choose a leader.
const QUORUM: Duration = Duration::from_mins(1);

/// The jars that Debian's packages install.
const JARS: &str = "/usr/share/java/zookeeper.jar:/usr/share/java/slf4j-simple.jar";

/// One server.
#[derive(Debug)]
pub struct ZooKeeper {
    /// Its process.
    pub program: Program,
    folder: Folder,
}

impl ZooKeeper {
    /// A server of its own.
    ///
    /// # Panics
    /// If it does not start.
    pub fn alone() -> Self {
        let mut server = Self::launch(1, "", free_port());
        server.program.wait_until_it_listens();
        server.wait_until_it_serves();
        server
    }

    /// The address of a server that the tests of a process share. No test kills or stops it.
    ///
    /// # Panics
    /// If it does not start.
    pub fn shared() -> &'static str {
        static SERVER: OnceLock<String> = OnceLock::new();
        SERVER.get_or_init(|| {
            let (started, starting) = mpsc::channel();
            // A server dies with the thread that started it. This thread lives as long as the process.
            thread::spawn(move || {
                let server = Self::alone();
                started.send(server.host()).expect("the test waits");
                loop {
                    thread::park();
                }
            });
            starting.recv().expect("the server starts")
        })
    }

    /// An ensemble of this many servers, which has a leader.
    ///
    /// # Panics
    /// If one of them does not start.
    pub fn ensemble(size: usize) -> Vec<Self> {
        let ports: Vec<_> = (0..size).map(|_| [free_port(), free_port(), free_port()]).collect();
        let line = |(id, [_, quorum, election]): (usize, &[u16; 3])| {
            format!("server.{}=127.0.0.1:{quorum}:{election}\n", id + 1)
        };
        let peers: String = ports.iter().enumerate().map(line).collect();
        let peers = format!("standaloneEnabled=false\n{peers}");
        let mut servers: Vec<_> =
            ports.iter().enumerate().map(|(id, [port, ..])| Self::launch(id + 1, &peers, *port)).collect();
        for server in &mut servers {
            server.program.wait_until_it_listens();
        }
        for server in &servers {
            server.wait_until_it_serves();
        }
        servers
    }

    /// The address of this server.
    pub fn host(&self) -> String {
        format!("127.0.0.1:{}", self.program.port)
    }

    /// Whether it is the leader of its ensemble.
    pub fn is_leader(&self) -> bool {
        self.query("srvr").contains("Mode: leader")
    }

    /// The answer to one of ZooKeeper's words of four letters. Empty if there is none.
    pub fn query(&self, word: &str) -> String {
        let query = || {
            let mut stream = TcpStream::connect(("127.0.0.1", self.program.port))?;
            stream.set_read_timeout(Some(Duration::from_secs(1)))?;
            stream.write_all(word.as_bytes())?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            std::io::Result::Ok(answer)
        };
        query().unwrap_or_default()
    }

    /// One of the numbers that `mntr` prints, such as `zk_watch_count`. Zero if it does not.
    pub fn number(&self, name: &str) -> u64 {
        let answer = self.query("mntr");
        let line = answer.lines().find_map(|it| it.strip_prefix(name)?.strip_prefix('\t'));
        line.and_then(|it| it.trim().parse().ok()).unwrap_or(0)
    }

    /// Waits until it serves clients, alone or with a quorum.
    ///
    /// # Panics
    /// If it does not within a minute.
    pub fn wait_until_it_serves(&self) {
        let deadline = Instant::now() + QUORUM;
        while !self.query("srvr").contains("Mode:") {
            let log = || fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the server on port {} has no quorum\n{}", self.program.port, log());
            thread::sleep(Duration::from_millis(10));
        }
    }

    fn launch(id: usize, peers: &str, port: u16) -> Self {
        let folder = Folder::new();
        let data = folder.path().join("data");
        fs::create_dir(&data).expect("create a folder");
        fs::write(data.join("myid"), id.to_string()).expect("write a file");
        let config = format!(
            "tickTime=200\ninitLimit=15\nsyncLimit=5\ndataDir={}\nclientPort={port}\n\
             clientPortAddress=127.0.0.1\nminSessionTimeout=400\nmaxSessionTimeout=600000\nmaxClientCnxns=0\n\
             admin.enableServer=false\n4lw.commands.whitelist=*\n{peers}",
            data.display()
        );
        let file = folder.path().join("zoo.cfg");
        fs::write(&file, config).expect("write a file");
        let file = file.to_str().expect("a path in UTF-8");
        // A small compiler and collector: it starts sooner.
        let flags = ["-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto"];
        let main = "org.apache.zookeeper.server.quorum.QuorumPeerMain";
        let arguments: Vec<_> =
            flags.into_iter().chain(["-Dzookeeper.forceSync=no", "-cp", JARS, main, file]).collect();
        let program = Program::launch("java", &arguments, folder.path(), port);
        Self { program, folder }
    }
}
