"""Archives of the classes that Kafka and Spark load. They save a third of the processor time of a start (JEP 350).

A run of the tests starts many of both. `python -m tests.make_class_archives` makes the archives. They lie in the
virtual environment, whose jars they know. Java ignores an archive that is missing, or was made with other jars.
"""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from pathlib import Path

FOLDER = Path(sys.prefix) / "class-archives"
KAFKA, SPARK = FOLDER / "kafka.jsa", FOLDER / "spark.jsa"
# Each process lives for seconds or minutes, in which the optimizing compiler takes more time than its code saves.
NO_OPTIMIZER = "-XX:TieredStopAtLevel=1"
_SILENT = "-Xlog:cds=off -Xlog:cds+dynamic=off"  # Otherwise every other program says that Kafka's archive is not its.


def use_archives(environment: MutableMapping[str, str]) -> None:
    """Have every Java that the tests start use the archives, as soon as they exist.

    Args:
        environment: of this process. A developer's own JDK_JAVA_OPTIONS and SPARK_SUBMIT_OPTS are kept.
    """
    environment.setdefault("JDK_JAVA_OPTIONS", f"{NO_OPTIMIZER} {_SILENT} {_use(KAFKA)}")
    # Not in spark-defaults.conf: Spark puts its folder on the class path, and Java uses no archive with such a folder.
    environment.setdefault("SPARK_SUBMIT_OPTS", _use(SPARK))


def _use(archive: Path) -> str:
    return f'"-XX:SharedArchiveFile={archive}"'
