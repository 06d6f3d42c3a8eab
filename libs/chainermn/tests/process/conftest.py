"""Jobs that tests of processes look at."""

from libs.chainermn.tests.process.stand_in_job import start_job as start_job
