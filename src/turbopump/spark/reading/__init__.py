"""Reading topics: options, planning on the driver, and the pulls of tasks."""

import sys

from turbopump.spark.reading import partition_planner

# Options and ranges pickled by version 0.1 name the module that they came from.
sys.modules[f"{__name__}.planning"] = partition_planner
