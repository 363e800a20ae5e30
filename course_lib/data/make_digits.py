"""How digits.npz was made; run it again and the file is the same, byte for byte.

    python -m venv /tmp/sk && /tmp/sk/bin/pip install scikit-learn==1.9.1
    /tmp/sk/bin/python course_lib/data/make_digits.py

scikit-learn is needed here only, never by the course.
"""

import io
import zipfile
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
arrays = {"images": digits.images.astype(np.uint8), "labels": digits.target.astype(np.uint8)}
with zipfile.ZipFile(Path(__file__).with_name("digits.npz"), "w", zipfile.ZIP_DEFLATED) as archive:
    for name, array in arrays.items():
        entry = io.BytesIO()
        np.save(entry, array)
        # A fixed date: np.savez would store today's, and the file would change each time.
        info = zipfile.ZipInfo(f"{name}.npy", date_time=(1998, 7, 1, 0, 0, 0))
        info.compress_type = zipfile.ZIP_DEFLATED
        archive.writestr(info, entry.getvalue())
