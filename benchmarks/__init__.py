"""Measurements that `launch.py bench` runs. Kept results are in results/."""
