//! The tables, and their migrations.

/// Steps from each version of the tables to the next one; a released step is never changed.
pub(super) const MIGRATIONS: [&str; 13] = [
    "
    CREATE TABLE app (
        id INTEGER PRIMARY KEY,
        token_hash BLOB NOT NULL UNIQUE,
        email TEXT NOT NULL,
        name TEXT NOT NULL,
        created REAL NOT NULL
    ) STRICT;
    CREATE TABLE sample_set (
        number INTEGER PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        app INTEGER NOT NULL REFERENCES app (id),
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        received REAL NOT NULL,
        samples INTEGER NOT NULL,
        evidence TEXT NOT NULL,
        body BLOB NOT NULL
    ) STRICT;
    CREATE INDEX sample_set_group ON sample_set (app, ruby_major, ruby_minor, number, samples);
",
    "
    ALTER TABLE app ADD COLUMN sets INTEGER NOT NULL DEFAULT 0;
    ALTER TABLE app ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0;
    UPDATE app SET
        sets = (SELECT count(*) FROM sample_set WHERE sample_set.app = app.id),
        bytes = (SELECT coalesce(sum(length(body) + octet_length(evidence)), 0) FROM sample_set WHERE sample_set.app = app.id);
    CREATE INDEX sample_set_app ON sample_set (app, number);
    CREATE INDEX sample_set_received ON sample_set (received);
",
    "
    ALTER TABLE app ADD COLUMN slots INTEGER NOT NULL DEFAULT 0;
    CREATE TABLE slot (
        app INTEGER NOT NULL REFERENCES app (id),
        at INTEGER NOT NULL,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        environment TEXT NOT NULL,
        host TEXT NOT NULL,
        pid INTEGER NOT NULL,
        sets INTEGER NOT NULL,
        cycles INTEGER NOT NULL,
        majors INTEGER NOT NULL,
        gc_ms INTEGER NOT NULL,
        gc_seconds REAL NOT NULL,
        c0 INTEGER NOT NULL, c1 INTEGER NOT NULL, c2 INTEGER NOT NULL, c3 INTEGER NOT NULL, c4 INTEGER NOT NULL,
        c5 INTEGER NOT NULL, c6 INTEGER NOT NULL, c7 INTEGER NOT NULL, c8 INTEGER NOT NULL, c9 INTEGER NOT NULL,
        rss INTEGER NOT NULL,
        slots INTEGER NOT NULL,
        PRIMARY KEY (app, at, ruby_major, ruby_minor, environment, host, pid)
    ) STRICT, WITHOUT ROWID;
",
    "
    CREATE TABLE environment (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        app INTEGER NOT NULL REFERENCES app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        in_force TEXT NOT NULL,
        UNIQUE (app, ruby_major, ruby_minor, in_force)
    ) STRICT;
    ALTER TABLE sample_set ADD COLUMN environment INTEGER;
    CREATE INDEX sample_set_environment ON sample_set (environment, number);
    CREATE TABLE advised (
        app INTEGER NOT NULL REFERENCES app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        setting TEXT NOT NULL,
        given REAL NOT NULL,
        PRIMARY KEY (app, ruby_major, ruby_minor, setting)
    ) STRICT, WITHOUT ROWID;
",
    "
    CREATE TABLE token (
        hash BLOB PRIMARY KEY NOT NULL,
        app INTEGER REFERENCES app (id) ON DELETE CASCADE,
        rights TEXT NOT NULL,
        created REAL NOT NULL,
        ends REAL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX token_app ON token (app);
    INSERT INTO token (hash, app, rights, created) SELECT token_hash, id, 'both', created FROM app;
    -- Nothing reads it any more, but SQLite cannot drop a column that is unique.
    UPDATE app SET token_hash = randomblob(32);
    ALTER TABLE app ADD COLUMN parent INTEGER REFERENCES app (id) ON DELETE CASCADE;
",
    "
    ALTER TABLE environment ADD COLUMN first REAL;
    UPDATE environment SET first = (SELECT min(received) FROM sample_set WHERE environment = environment.id);
    CREATE TABLE given (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        app INTEGER NOT NULL REFERENCES app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        strategy TEXT NOT NULL,
        in_force TEXT NOT NULL,
        settings TEXT NOT NULL,
        withdrawal INTEGER NOT NULL,
        first REAL NOT NULL,
        last REAL NOT NULL
    ) STRICT;
    CREATE INDEX given_group ON given (app, ruby_major, ruby_minor, id);
",
    "
    ALTER TABLE environment ADD COLUMN summary TEXT;
    ALTER TABLE environment ADD COLUMN summarized INTEGER;
    ALTER TABLE environment ADD COLUMN seen REAL;
",
    "
    ALTER TABLE app ADD COLUMN samples INTEGER NOT NULL DEFAULT 0;
    UPDATE app SET samples =
        (SELECT coalesce(sum(s.samples), 0) FROM sample_set AS s WHERE s.app = app.id);
",
    "
    CREATE TABLE period (
        id INTEGER PRIMARY KEY,
        environment INTEGER NOT NULL REFERENCES environment (id) ON DELETE CASCADE,
        first REAL NOT NULL,
        last REAL NOT NULL
    ) STRICT;
    CREATE INDEX period_environment ON period (environment, id);
    INSERT INTO period (environment, first, last)
        SELECT id, coalesce(first, at), at FROM (
            SELECT e.id, e.first, coalesce(
                (SELECT s.received FROM sample_set AS s WHERE s.environment = e.id ORDER BY s.number DESC LIMIT 1),
                e.seen
            ) AS at FROM environment AS e
        ) AS known WHERE at IS NOT NULL ORDER BY at;
",
    "
    ALTER TABLE period ADD COLUMN sets INTEGER NOT NULL DEFAULT 1;
    UPDATE period SET sets =
        max(1, (SELECT count(*) FROM sample_set AS s WHERE s.environment = period.environment));
    ALTER TABLE environment ADD COLUMN since REAL;
    ALTER TABLE environment ADD COLUMN until REAL;
    ALTER TABLE environment ADD COLUMN stretch INTEGER;
    UPDATE environment SET since = latest.first, until = latest.last, stretch = latest.sets FROM (
        SELECT environment AS id, first, max(last) AS last, sets FROM period GROUP BY environment
    ) AS latest WHERE latest.id = environment.id;
",
    "
    -- The highest number of an application, which is never given again.
    CREATE TABLE app_number (last INTEGER NOT NULL) STRICT;
    INSERT INTO app_number SELECT coalesce(max(id), 0) FROM app;
",
    "
    -- Sets that were deleted, but that are still in figures.
    CREATE TABLE gone (
        place INTEGER PRIMARY KEY,
        id BLOB NOT NULL UNIQUE,
        app INTEGER NOT NULL REFERENCES app (id) ON DELETE CASCADE,
        received REAL NOT NULL
    ) STRICT;
    CREATE INDEX gone_app ON gone (app, place);
    CREATE INDEX gone_received ON gone (received);
",
    "
    -- The highest number of a set, which is never given again.
    CREATE TABLE set_number (last INTEGER NOT NULL) STRICT;
    INSERT INTO set_number SELECT max(
        (SELECT coalesce(max(number), 0) FROM sample_set), (SELECT coalesce(max(summarized), 0) FROM environment)
    );
",
];
