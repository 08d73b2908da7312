"""What training needs besides the program on the device: schedules, records and reports."""
