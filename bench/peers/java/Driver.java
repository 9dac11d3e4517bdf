import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.sql.Connection;
import java.sql.DriverManager;
import java.sql.ResultSet;
import java.sql.Statement;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.TimeUnit;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.ExponentialBackoffRetry;

/** Drives Curator through the line protocol of `src/job.rs`: one job, a thread for each task. */
public class Driver {
    private static String job;
    private static CuratorFramework client;

    public static void main(String[] arguments) throws Exception {
        if (arguments.length > 0 && arguments[0].equals("--version")) {
            Class.forName("org.postgresql.Driver");
            String version = InterProcessMutex.class.getPackage().getImplementationVersion();
            System.out.println((version == null ? "of Debian" : version) + ", Java " + System.getProperty("java.version"));
            return;
        }
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        job = lines.readLine();
        client = CuratorFrameworkFactory.newClient(text("zookeeper"), new ExponentialBackoffRetry(100, 5));
        client.start();
        List<long[]> warm = work(0);
        System.out.println("{\"ready\":{\"done\":" + warm.size() + "}}");
        lines.readLine();
        long began = System.nanoTime();
        long cpu = cpu();
        List<long[]> rows = work(number("warm_ms") + number("run_ms"));
        StringBuilder said = new StringBuilder("{\"finished\":{\"began\":" + began + ",\"cpu_us\":" + (cpu() - cpu) / 1000);
        said.append(",\"operations\":{");
        String[] columns = {"key", "asked", "granted", "let_go", "done"};
        for (int at = 0; at < columns.length; at++) {
            said.append(at > 0 ? "," : "").append('"').append(columns[at]).append("\":[");
            for (int row = 0; row < rows.size(); row++) {
                long value = rows.get(row)[at] - (at > 0 ? began : 0);
                said.append(row > 0 ? "," : "").append(value);
            }
            said.append(']');
        }
        System.out.println(said.append("}}}"));
        System.out.flush();
        System.exit(0);
    }

    /** Lets all threads work. */
    private static List<long[]> work(long milliseconds) throws Exception {
        long end = System.nanoTime() + milliseconds * 1_000_000;
        List<long[]> rows = new ArrayList<>();
        List<Exception> failures = new ArrayList<>();
        List<Thread> threads = new ArrayList<>();
        for (long task = 0; task < number("tasks"); task++) {
            long own = number("keys") == 0 ? number("process") * number("tasks") + task : 0;
            threads.add(new Thread(() -> {
                List<long[]> mine = new ArrayList<>();
                boolean isHotRow = text("scenario").equals("hot-row");
                try (Connection conn = isHotRow ? connect() : null) {
                    InterProcessMutex mutex = new InterProcessMutex(client, "/bench-curator/" + own);
                    do {
                        long asked = System.nanoTime();
                        if (!mutex.acquire(60, TimeUnit.SECONDS)) {
                            throw new IllegalStateException("gave up");
                        }
                        long granted = System.nanoTime();
                        if (conn != null) {
                            raise(conn);
                        }
                        long letGo = System.nanoTime();
                        mutex.release();
                        mine.add(new long[] {own, asked, granted, letGo, System.nanoTime()});
                    } while (System.nanoTime() < end);
                } catch (Exception err) {
                    synchronized (failures) {
                        failures.add(err);
                    }
                }
                synchronized (rows) {
                    rows.addAll(mine);
                }
            }));
        }
        for (Thread thread : threads) {
            thread.start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        if (!failures.isEmpty()) {
            throw failures.get(0);
        }
        return rows;
    }

    private static Connection connect() throws Exception {
        Matcher url = Pattern.compile("postgres(?:ql)?://(?:([^:@]*)(?::([^@]*))?@)?(.*)").matcher(text("url"));
        if (!url.matches()) {
            throw new IllegalArgumentException(text("url"));
        }
        return DriverManager.getConnection("jdbc:postgresql://" + url.group(3), url.group(1), url.group(2));
    }

    private static void raise(Connection conn) throws Exception {
        try (Statement statement = conn.createStatement()) {
            ResultSet row = statement.executeQuery("SELECT value FROM bench_row WHERE id = 0");
            row.next();
            long value = row.getLong(1) + 1;
            statement.executeUpdate("UPDATE bench_row SET value = " + value + " WHERE id = 0");
        }
    }

    private static long cpu() {
        var bean = java.lang.management.ManagementFactory.getOperatingSystemMXBean();
        return ((com.sun.management.OperatingSystemMXBean) bean).getProcessCpuTime();
    }

    private static String text(String name) {
        Matcher matcher = Pattern.compile("\"" + name + "\":\"([^\"]*)\"").matcher(job);
        return matcher.find() ? matcher.group(1) : "";
    }

    private static long number(String name) {
        Matcher matcher = Pattern.compile("\"" + name + "\":(\\d+)").matcher(job);
        return matcher.find() ? Long.parseLong(matcher.group(1)) : 0;
    }
}
