import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.util.concurrent.TimeUnit;
import org.apache.curator.framework.CuratorFramework;
import org.apache.curator.framework.CuratorFrameworkFactory;
import org.apache.curator.framework.recipes.locks.InterProcessMutex;
import org.apache.curator.retry.RetryOneTime;

/** A mutex of Curator that does what the lines of its standard input say. Its arguments are the server and the path. */
public class Curator {
    public static void main(String[] arguments) throws Exception {
        CuratorFramework client = CuratorFrameworkFactory.newClient(arguments[0], 10000, 10000, new RetryOneTime(100));
        client.start();
        InterProcessMutex mutex = new InterProcessMutex(client, arguments[1]);
        BufferedReader commands = new BufferedReader(new InputStreamReader(System.in));
        String command;
        while ((command = commands.readLine()) != null) {
            switch (command) {
                case "try":
                    System.out.println(mutex.acquire(0, TimeUnit.SECONDS));
                    break;
                case "acquire":
                    mutex.acquire();
                    System.out.println("acquired");
                    break;
                case "release":
                    mutex.release();
                    System.out.println("released");
                    break;
                default:
                    throw new IllegalArgumentException(command);
            }
        }
        System.exit(0);
    }
}
