"""Chats of a shared beginning: locust -f examples/serving/locustfile.py --host URL."""

from locust import HttpUser, between, task


class Chatter(HttpUser):
    """One who asks, reads and asks again."""

    wait_time = between(0.5, 2)

    @task
    def ask(self) -> None:
        """Ask for an answer whose length the server's workload says."""
        messages = [
            {"role": "system", "content": "You answer in one sentence. " * 20},
            {"role": "user", "content": "What is a KV cache?"},
        ]
        self.client.post("/v1/chat/completions", json={"messages": messages})
