import ai.djl.inference.Predictor;
import ai.djl.inference.streaming.ChunkedBytesSupplier;
import ai.djl.modality.Input;
import ai.djl.modality.Output;
import ai.djl.ndarray.BytesSupplier;
import ai.djl.repository.zoo.Criteria;
import ai.djl.repository.zoo.ZooModel;
import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.EOFException;
import java.io.IOException;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.nio.file.Path;
import java.util.Arrays;
import java.util.Map;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;

/**
 * A model directory under DJL's Python engine: requests come on stdin, what becomes of them goes to stdout.
 *
 * <p>A request: int id, short count, count x (key, value), int length, body. With id -1: int streams, int requests of
 * each, int length, body, which is measured here. An event: byte kind ('c' chunk, 'e' end, 'm' measurement), int id, int
 * length, bytes; an end is "code\nmessage\nkey\tvalue\n...", before the first chunk "h" brings the same.
 */
public final class Driver {

    private static final int TIMEOUT = 150;
    private static DataOutputStream out;

    public static void main(String[] args) throws Exception {
        out = new DataOutputStream(System.out);
        System.setOut(new PrintStream(System.err, true));
        Criteria<Input, Output> criteria =
                Criteria.builder()
                        .setTypes(Input.class, Output.class)
                        .optModelPath(Path.of(args[0]))
                        .optEngine("Python")
                        .build();
        ExecutorService pool = Executors.newCachedThreadPool();
        try (ZooModel<Input, Output> model = criteria.loadModel();
                Predictor<Input, Output> predictor = model.newPredictor()) {
            event('r', 0, new byte[0]);
            DataInputStream in = new DataInputStream(System.in);
            while (true) {
                int id = in.readInt();
                if (id == -1) {
                    int streams = in.readInt();
                    int requests = in.readInt();
                    byte[] body = in.readNBytes(in.readInt());
                    pool.submit(() -> measure(predictor, streams, requests, body));
                    continue;
                }
                Input input = new Input();
                for (int left = in.readShort(); left > 0; --left) {
                    input.addProperty(in.readUTF(), in.readUTF());
                }
                input.add("data", in.readNBytes(in.readInt()));
                pool.submit(() -> answer(predictor, id, input));
            }
        } catch (EOFException e) {
            System.err.println("driver: stdin ended");
        }
        System.exit(0);
    }

    private static void answer(Predictor<Input, Output> predictor, int id, Input input) {
        try {
            Output output = predictor.predict(input);
            BytesSupplier data = output.getData();
            if (data instanceof ChunkedBytesSupplier) {
                ChunkedBytesSupplier chunks = (ChunkedBytesSupplier) data;
                boolean first = true;
                while (chunks.hasNext()) {
                    byte[] chunk = chunks.nextChunk(TIMEOUT, TimeUnit.SECONDS);
                    if (first) {
                        event('h', id, head(output));
                        first = false;
                    }
                    event('c', id, chunk);
                }
            } else if (data != null) {
                event('c', id, data.getAsBytes());
            }
            event('e', id, head(output));
        } catch (Throwable e) {
            event('x', id, String.valueOf(e).getBytes(StandardCharsets.UTF_8));
        }
    }

    private static byte[] head(Output output) {
        StringBuilder head = new StringBuilder().append(output.getCode()).append('\n');
        head.append(String.valueOf(output.getMessage()).replace('\n', ' ')).append('\n');
        for (Map.Entry<String, String> entry : output.getProperties().entrySet()) {
            head.append(entry.getKey()).append('\t').append(entry.getValue()).append('\n');
        }
        return head.toString().getBytes(StandardCharsets.UTF_8);
    }

    /** Tokens are lines. Latency between tokens is that between chunks, divided by the tokens of the later one. */
    private static void measure(Predictor<Input, Output> predictor, int streams, int requests, byte[] body) {
        AtomicLong tokens = new AtomicLong();
        AtomicLong failed = new AtomicLong();
        long[] first = new long[streams * requests];
        Thread[] threads = new Thread[streams];
        long begun = System.nanoTime();
        for (int i = 0; i < streams; ++i) {
            int stream = i;
            threads[i] =
                    new Thread(
                            () -> {
                                for (int j = 0; j < requests; ++j) {
                                    try {
                                        long start = System.nanoTime();
                                        Input input = new Input();
                                        input.addProperty("Content-Type", "application/json");
                                        input.add("data", body);
                                        ChunkedBytesSupplier chunks =
                                                (ChunkedBytesSupplier) predictor.predict(input).getData();
                                        while (chunks.hasNext()) {
                                            byte[] chunk = chunks.nextChunk(TIMEOUT, TimeUnit.SECONDS);
                                            int lines = 0;
                                            for (byte b : chunk) {
                                                lines += b == '\n' ? 1 : 0;
                                            }
                                            if (lines > 0 && first[stream * requests + j] == 0) {
                                                first[stream * requests + j] = System.nanoTime() - start;
                                            }
                                            tokens.addAndGet(lines);
                                        }
                                    } catch (Throwable e) {
                                        failed.incrementAndGet();
                                    }
                                }
                            });
            threads[i].start();
        }
        try {
            for (Thread thread : threads) {
                thread.join();
            }
        } catch (InterruptedException e) {
            Thread.currentThread().interrupt();
        }
        double seconds = (System.nanoTime() - begun) / 1e9;
        Arrays.sort(first);
        String result =
                String.format(
                        "{\"tokens\":%d,\"seconds\":%.6f,\"failed\":%d,\"ttft_p50\":%.6f,\"ttft_p99\":%.6f}",
                        tokens.get(),
                        seconds,
                        failed.get(),
                        first[first.length / 2] / 1e9,
                        first[(int) Math.min(first.length - 1, first.length * 0.99)] / 1e9);
        event('m', -1, result.getBytes(StandardCharsets.UTF_8));
    }

    private static synchronized void event(int kind, int id, byte[] bytes) {
        ByteArrayOutputStream whole = new ByteArrayOutputStream(bytes.length + 9);
        DataOutputStream frame = new DataOutputStream(whole);
        try {
            frame.writeByte(kind);
            frame.writeInt(id);
            frame.writeInt(bytes.length);
            frame.write(bytes);
            out.write(whole.toByteArray());
            out.flush();
        } catch (IOException e) {
            System.exit(1);
        }
    }
}
