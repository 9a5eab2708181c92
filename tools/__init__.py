"""Programs that make files of this repository; run by ``make docs``."""
