"""Many engines: routers, pools that prefill or decode, replicas that come and go."""
