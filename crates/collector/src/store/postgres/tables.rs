//! The tables, and their migrations.

/// Steps from each version of the tables to the next one; a released step is never changed.
pub(super) const MIGRATIONS: [&str; 13] = [
    "
    CREATE TABLE gctrace_app (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        token_hash BYTEA NOT NULL UNIQUE,
        email TEXT NOT NULL,
        name TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL
    );
    CREATE TABLE gctrace_sample_set (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id TEXT NOT NULL UNIQUE,
        app BIGINT NOT NULL REFERENCES gctrace_app (id),
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        received DOUBLE PRECISION NOT NULL,
        samples BIGINT NOT NULL,
        evidence TEXT NOT NULL,
        body BYTEA NOT NULL
    );
    -- The body is compressed already.
    ALTER TABLE gctrace_sample_set ALTER COLUMN body SET STORAGE EXTERNAL;
    CREATE INDEX gctrace_sample_set_group ON gctrace_sample_set (app, ruby_major, ruby_minor, number);
    CREATE INDEX gctrace_sample_set_app ON gctrace_sample_set (app, number);
",
    "
    ALTER TABLE gctrace_app ADD COLUMN sets BIGINT NOT NULL DEFAULT 0, ADD COLUMN bytes BIGINT NOT NULL DEFAULT 0;
    UPDATE gctrace_app SET sets = counted.sets, bytes = counted.bytes FROM (
        SELECT app, count(*) AS sets, sum(octet_length(body) + octet_length(evidence)) AS bytes
        FROM gctrace_sample_set GROUP BY app
    ) AS counted WHERE counted.app = gctrace_app.id;
    CREATE INDEX gctrace_sample_set_received ON gctrace_sample_set (received);
",
    "
    ALTER TABLE gctrace_app ADD COLUMN slots BIGINT NOT NULL DEFAULT 0;
    CREATE TABLE gctrace_slot (
        app BIGINT NOT NULL REFERENCES gctrace_app (id),
        at BIGINT NOT NULL,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        environment TEXT NOT NULL,
        host TEXT NOT NULL,
        pid BIGINT NOT NULL,
        sets BIGINT NOT NULL,
        cycles BIGINT NOT NULL,
        majors BIGINT NOT NULL,
        gc_ms BIGINT NOT NULL,
        gc_seconds DOUBLE PRECISION NOT NULL,
        c0 BIGINT NOT NULL, c1 BIGINT NOT NULL, c2 BIGINT NOT NULL, c3 BIGINT NOT NULL, c4 BIGINT NOT NULL,
        c5 BIGINT NOT NULL, c6 BIGINT NOT NULL, c7 BIGINT NOT NULL, c8 BIGINT NOT NULL, c9 BIGINT NOT NULL,
        rss BIGINT NOT NULL,
        slots BIGINT NOT NULL,
        PRIMARY KEY (app, at, ruby_major, ruby_minor, environment, host, pid)
    );
",
    "
    CREATE TABLE gctrace_environment (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        app BIGINT NOT NULL REFERENCES gctrace_app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        in_force TEXT NOT NULL,
        UNIQUE (app, ruby_major, ruby_minor, in_force)
    );
    ALTER TABLE gctrace_sample_set ADD COLUMN environment BIGINT;
    CREATE INDEX gctrace_sample_set_environment ON gctrace_sample_set (environment, number);
    CREATE TABLE gctrace_advised (
        app BIGINT NOT NULL REFERENCES gctrace_app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        setting TEXT NOT NULL,
        given DOUBLE PRECISION NOT NULL,
        PRIMARY KEY (app, ruby_major, ruby_minor, setting)
    );
",
    "
    CREATE TABLE gctrace_token (
        hash BYTEA PRIMARY KEY,
        app BIGINT REFERENCES gctrace_app (id) ON DELETE CASCADE,
        rights TEXT NOT NULL,
        created DOUBLE PRECISION NOT NULL,
        ends DOUBLE PRECISION
    );
    CREATE INDEX gctrace_token_app ON gctrace_token (app);
    INSERT INTO gctrace_token (hash, app, rights, created) SELECT token_hash, id, 'both', created FROM gctrace_app;
    ALTER TABLE gctrace_app DROP COLUMN token_hash,
        ADD COLUMN parent BIGINT REFERENCES gctrace_app (id) ON DELETE CASCADE;
",
    "
    ALTER TABLE gctrace_environment ADD COLUMN first DOUBLE PRECISION;
    UPDATE gctrace_environment AS e SET first =
        (SELECT min(received) FROM gctrace_sample_set AS s WHERE s.environment = e.id);
    CREATE TABLE gctrace_given (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        app BIGINT NOT NULL REFERENCES gctrace_app (id) ON DELETE CASCADE,
        ruby_major INTEGER NOT NULL,
        ruby_minor INTEGER NOT NULL,
        strategy TEXT NOT NULL,
        in_force TEXT NOT NULL,
        settings TEXT NOT NULL,
        withdrawal BOOLEAN NOT NULL,
        first DOUBLE PRECISION NOT NULL,
        last DOUBLE PRECISION NOT NULL
    );
    CREATE INDEX gctrace_given_group ON gctrace_given (app, ruby_major, ruby_minor, id);
",
    "
    ALTER TABLE gctrace_environment ADD COLUMN summary TEXT, ADD COLUMN summarized BIGINT,
        ADD COLUMN seen DOUBLE PRECISION;
",
    "
    ALTER TABLE gctrace_app ADD COLUMN samples BIGINT NOT NULL DEFAULT 0;
    UPDATE gctrace_app SET samples =
        (SELECT coalesce(sum(s.samples), 0)::BIGINT FROM gctrace_sample_set AS s WHERE s.app = gctrace_app.id);
",
    "
    CREATE TABLE gctrace_period (
        id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        environment BIGINT NOT NULL REFERENCES gctrace_environment (id) ON DELETE CASCADE,
        first DOUBLE PRECISION NOT NULL,
        last DOUBLE PRECISION NOT NULL
    );
    CREATE INDEX gctrace_period_environment ON gctrace_period (environment, id);
    INSERT INTO gctrace_period (environment, first, last)
        SELECT id, coalesce(first, at), at FROM (
            SELECT e.id, e.first, coalesce(
                (SELECT s.received FROM gctrace_sample_set AS s WHERE s.environment = e.id ORDER BY s.number DESC LIMIT 1),
                e.seen
            ) AS at FROM gctrace_environment AS e
        ) AS known WHERE at IS NOT NULL ORDER BY at;
",
    "
    ALTER TABLE gctrace_period ADD COLUMN sets BIGINT NOT NULL DEFAULT 1;
    UPDATE gctrace_period AS p SET sets =
        greatest(1, (SELECT count(*) FROM gctrace_sample_set AS s WHERE s.environment = p.environment));
    ALTER TABLE gctrace_environment ADD COLUMN since DOUBLE PRECISION, ADD COLUMN until DOUBLE PRECISION,
        ADD COLUMN stretch BIGINT;
    UPDATE gctrace_environment AS e SET since = latest.first, until = latest.last, stretch = latest.sets FROM (
        SELECT DISTINCT ON (environment) environment, first, last, sets FROM gctrace_period
        ORDER BY environment, last DESC
    ) AS latest WHERE latest.environment = e.id;
",
    // The SQLite store counts its applications in this step; an identity column does so by itself.
    "",
    "
    -- Sets that were deleted, but that are still in figures.
    CREATE TABLE gctrace_gone (
        place BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        id BYTEA NOT NULL UNIQUE,
        app BIGINT NOT NULL REFERENCES gctrace_app (id) ON DELETE CASCADE,
        received DOUBLE PRECISION NOT NULL
    );
    CREATE INDEX gctrace_gone_app ON gctrace_gone (app, place);
    CREATE INDEX gctrace_gone_received ON gctrace_gone (received);
",
    // The SQLite store counts its sets in this step; an identity column does so by itself.
    "",
];
