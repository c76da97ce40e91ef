"""Sums ncu's kernel times of the last third of a run (gpu_step steps=1: two warm-up steps and one more) by kernel name.

    ncu --clock-control none --metrics gpu__time_duration.sum --csv ./gpu_step DIR steps=1 > k.csv; kernel_times.py k.csv"""
import csv
import re
import sys
from collections import defaultdict

rows = []
with open(sys.argv[1], errors="replace") as f:
    lines = [line for line in f if line.startswith('"')]
for row in csv.DictReader(lines):
    if row.get("Metric Name") == "gpu__time_duration.sum":
        scale = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}[row["Metric Unit"]]
        rows.append((row["Kernel Name"], float(row["Metric Value"].replace(",", "")) * scale))
rows = rows[len(rows) * 2 // 3 :]
total = defaultdict(lambda: [0, 0.0])
for name, us in rows:
    name = re.sub(r"\(.*", "", name)
    name = re.sub(r"^void ", "", name)[:110]
    total[name][0] += 1
    total[name][1] += us
print(f"{len(rows)} kernels, {sum(us for _, us in rows) / 1e3:.1f} ms")
for name, (count, us) in sorted(total.items(), key=lambda item: -item[1][1])[: int(sys.argv[2]) if len(sys.argv) > 2 else 40]:
    print(f"{us / 1e3:9.2f} ms {count:6d} × {us / count:9.1f} us  {name}")
