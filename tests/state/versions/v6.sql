-- state.db as the release of schema version 6 wrote it. Never edited.
CREATE TABLE migrations (
    version INTEGER PRIMARY KEY,
    applied_unix_s REAL NOT NULL
) STRICT;
CREATE TABLE jobs (
    name TEXT PRIMARY KEY,
    spec_json TEXT NOT NULL,
    index_fingerprint TEXT NOT NULL,
    state TEXT NOT NULL,
    created_unix_s REAL NOT NULL
) STRICT;
CREATE TABLE attempts (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    world_size INTEGER NOT NULL,
    start_cursor TEXT NOT NULL,
    opened_unix_s REAL NOT NULL,
    PRIMARY KEY (job, attempt)
) STRICT, WITHOUT ROWID;
CREATE TABLE ledger (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    cursor TEXT NOT NULL,
    plan_digest TEXT NOT NULL,
    world_size INTEGER NOT NULL,
    cost_version TEXT NOT NULL,
    planned_unix_s REAL NOT NULL,
    committed_unix_s REAL,
    PRIMARY KEY (job, attempt, step)
) STRICT, WITHOUT ROWID;
CREATE INDEX ledger_by_step ON ledger (job, step, attempt);
CREATE TABLE quarantine (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    sample_id INTEGER NOT NULL,
    source TEXT NOT NULL,
    key TEXT NOT NULL,
    reason TEXT NOT NULL,
    PRIMARY KEY (job, attempt, step, sample_id)
) STRICT, WITHOUT ROWID;
ALTER TABLE ledger ADD COLUMN predicted_s REAL;
ALTER TABLE ledger ADD COLUMN measured_s REAL;
CREATE TABLE costs (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    from_step INTEGER NOT NULL,
    cost_json TEXT NOT NULL,
    cost_version TEXT NOT NULL,
    recorded_unix_s REAL NOT NULL,
    PRIMARY KEY (job, from_step)
) STRICT, WITHOUT ROWID;
CREATE TABLE skips (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    action TEXT NOT NULL,
    from_attempt INTEGER NOT NULL,
    recorded_unix_s REAL NOT NULL,
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;
ALTER TABLE ledger ADD COLUMN content BLOB;
ALTER TABLE jobs ADD COLUMN spec_version INTEGER NOT NULL DEFAULT 1;
ALTER TABLE jobs ADD COLUMN "order" TEXT NOT NULL DEFAULT '';
CREATE TABLE specs (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    version INTEGER NOT NULL,
    spec_json TEXT NOT NULL,
    submitted_unix_s REAL NOT NULL,
    PRIMARY KEY (job, version)
) STRICT, WITHOUT ROWID;
ALTER TABLE attempts ADD COLUMN spec_version INTEGER NOT NULL DEFAULT 1;
ALTER TABLE attempts ADD COLUMN launch TEXT NOT NULL DEFAULT '';
ALTER TABLE costs ADD COLUMN spec_version INTEGER NOT NULL DEFAULT 1;
CREATE TABLE mixtures (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    change_json TEXT NOT NULL,
    recorded_unix_s REAL NOT NULL,
    PRIMARY KEY (job, number)
) STRICT, WITHOUT ROWID;
CREATE TABLE archives (
    job TEXT NOT NULL REFERENCES jobs (name) ON DELETE CASCADE,
    attempt INTEGER NOT NULL,
    first_step INTEGER NOT NULL,
    number INTEGER NOT NULL,
    last_step INTEGER NOT NULL,
    last_committed_step INTEGER NOT NULL,
    first_row INTEGER NOT NULL,
    file TEXT NOT NULL,
    PRIMARY KEY (job, attempt, first_step, number)
) STRICT, WITHOUT ROWID;
INSERT INTO migrations VALUES (1, 1.0);
INSERT INTO migrations VALUES (2, 2.0);
INSERT INTO migrations VALUES (3, 3.0);
INSERT INTO migrations VALUES (4, 4.0);
INSERT INTO migrations VALUES (5, 5.0);
INSERT INTO migrations VALUES (6, 6.0);
INSERT INTO jobs VALUES ('vlm-sft', '{"seed": 1}', 'f1', 'active', 10.25, 1, '');
INSERT INTO specs VALUES ('vlm-sft', 1, '{"seed": 1}', 10.25);
INSERT INTO attempts VALUES ('vlm-sft', 1, 8, '{"step": 0}', 11.5, 1, '');
INSERT INTO attempts VALUES ('vlm-sft', 2, 6, '{"step": 3}', 21.5, 1, '');
INSERT INTO ledger VALUES ('vlm-sft', 1, 0, '{"step": 0}', 'digest-1-0', 8, 'v1', 12.125, 12.5, 0.5, 0.625, NULL);
INSERT INTO ledger VALUES ('vlm-sft', 1, 1, '{"step": 1}', 'digest-1-1', 8, 'v1', 13.125, NULL, 0.75, NULL, NULL);
INSERT INTO costs VALUES ('vlm-sft', 1, '{}', 'v2', 13.5, 1);
INSERT INTO quarantine VALUES ('vlm-sft', 1, 0, 7, 'images', '000007', 'corrupt');
INSERT INTO skips VALUES ('vlm-sft', 1, 7, 8, 'skip', 2, 20.5);
INSERT INTO mixtures VALUES ('vlm-sft', 1, '{"weights": {"images": 2.0}, "from_step": 4}', 21.0);
