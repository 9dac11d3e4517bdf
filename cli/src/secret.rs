//! Passwords, which no message shows: neither ours nor a driver's.

use url::Url;

/// The passwords of the URLs in use, as they are written and as they are meant.
#[derive(Debug, Default)]
pub(crate) struct Secrets(Vec<String>);

impl Secrets {
    /// Remembers the password of this URL.
    pub(crate) fn add(&mut self, url: &str) {
        let parsed = Url::parse(url).ok().and_then(|it| it.password().map(str::to_owned));
        // A password may have any character, also those that end the user's part of a URL.
        let user = url.split_once(':').and_then(|(_, rest)| rest.trim_start_matches('/').rsplit_once('@'));
        let typed = user.and_then(|(user, _)| user.split_once(':')).map(|(_, password)| password.to_owned());
        let option = url.split("password=").skip(1).filter_map(|it| it.split('&').next().map(str::to_owned));
        // If it has ended that part, a driver may say what it takes for a host, a path or an option. What cannot be
        // told from a password is hidden as well.
        let is_part = |typed: &String| parsed.as_ref().is_none_or(|it| percent_decoded(it) != percent_decoded(typed));
        let whole = typed.clone().filter(is_part);
        for written in parsed.into_iter().chain(typed).chain(option) {
            let meant = percent_decoded(&written);
            self.0.extend([written, meant].into_iter().filter(|it| !it.is_empty()));
        }
        for text in whole.iter().flat_map(|it| [percent_decoded(it), it.clone()]) {
            let parts = text.split(['/', '?', '#', '&', '=', '+', ' ', '@', ':']).filter(|it| it.len() > 3);
            self.0.extend(parts.map(str::to_owned));
        }
    }

    /// The text with `***` in the place of each password.
    pub(crate) fn hidden_in(&self, text: &str) -> String {
        let found = self.0.iter().flat_map(|it| text.match_indices(&**it));
        let mut found: Vec<_> = found.map(|(start, it)| (start, start + it.len())).collect();
        found.sort_unstable();
        let (mut shown, mut end) = (String::new(), 0);
        for (start, stop) in found {
            // One may overlap another.
            if start >= end {
                shown.push_str(&text[end..start]);
                shown.push_str("***");
            }
            end = end.max(stop);
        }
        shown + &text[end..]
    }
}

fn percent_decoded(text: &str) -> String {
    let query = format!("p={}", text.replace('+', "%2B").replace('&', "%26"));
    url::form_urlencoded::parse(query.as_bytes()).next().map(|it| it.1.into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_hidden_as_it_is_written_and_as_it_is_meant() {
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:s%40cret@db/shop");
        assert_eq!(secrets.hidden_in("no `s@cret` at postgres://app:s%40cret@db"), "no `***` at postgres://app:***@db");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:half#open@db:port/shop");
        assert_eq!(secrets.hidden_in("postgres://app:half#open@db"), "postgres://app:***@db");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:x@%41y@db/shop");
        assert_eq!(secrets.hidden_in("postgres://app:x@%41y@db, `x@Ay`"), "postgres://app:***@db, `***`");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app@db/shop?password=s%40cret&port=x");
        assert_eq!(secrets.hidden_in("password=s%40cret is s@cret"), "password=*** is ***");
        let mut secrets = Secrets::default();
        secrets.add("mysql://app:1?half&s3cret&@db/shop");
        assert_eq!(secrets.hidden_in("unknown parameters `half`, `s3cret`"), "unknown parameters `***`, `***`");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app@db:1/shop?password=x@s3cret&port=y");
        assert_eq!(secrets.hidden_in("`1/shop?password=x@s3cret`, `x@s3cret`"), "`***`, `***`");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:open@s3cret/w?half=sesame@db/shop");
        assert_eq!(
            secrets.hidden_in("no host `s3cret`, no option `half=sesame`"),
            "no host `***`, no option `***=***`"
        );
        let mut secrets = Secrets::default();
        secrets.add("sqlite://app:1&2/?3+s3cret%21@db");
        assert_eq!(secrets.hidden_in("unknown parameter `3 s3cret!@db`"), "unknown parameter `3 ***@db`");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:s3cret@db/shop?application_name=me@here");
        assert_eq!(secrets.hidden_in("no `s3cret` in `shop`"), "no `***` in `***`");
        let mut secrets = Secrets::default();
        secrets.add("postgres://app:s3cret@db/shop");
        assert_eq!(secrets.hidden_in("no `s3cret` in `shop`"), "no `***` in `shop`");
        let mut secrets = Secrets::default();
        secrets.add("postgres:/app:s3cret@db/shop");
        assert_eq!(secrets.hidden_in("no database `app:s3cret@db/shop`"), "no database `app:***@db/shop`");
        assert_eq!(Secrets::default().hidden_in("nothing"), "nothing");
    }
}
