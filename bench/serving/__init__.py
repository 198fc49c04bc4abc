"""`plancast bench serve | throughput | latency`: vLLM's workloads and metrics, against any OpenAI-compatible server."""
